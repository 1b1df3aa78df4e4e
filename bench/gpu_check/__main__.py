"""`python -m bench.gpu_check`: how right and how fast everything is on this machine's GPUs.

Each check runs in a process of its own; what it found is kept, so that a run that was cut short, or
that had no time left, goes on where it stopped. Writes one page. Ends with 0, with 1 where
something is wrong, with 2 where there is no GPU, with 3 where checks are left to run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check import (
    checkpoints,
    collectives,
    kernels,
    memory,
    parity,
    profile,
    pushes,
    resume,
    serving,
    speed,
)
from bench.gpu_check.check import Check, Machine
from bench.pages import ROOT
from bench.proxy.machine import commit
from bench.tables import markdown
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

# In this order: what is wrong before what is slow; what others rest on before them.
CHECKS = (
    Check("kernels", 60, kernels.check),
    Check("collectives", 40, collectives.check),
    Check("parity", 120, parity.check),
    Check("checkpoint", 60, checkpoints.check_saved),
    Check("kill and resume", 120, resume.check),
    Check("export", 40, checkpoints.check_export),
    Check("memory estimate", 120, memory.check_estimate),
    Check("long rows", 120, memory.check_long_rows),
    Check("pushes by each transport", 120, pushes.check),
    Check("serve, ten pushes and a kill", 420, serving.check_served),
    Check("served precision", 225, serving.check_precision),
    Check("speed", 300, speed.check),
    Check("profile", 40, profile.check),
)
BUDGET_S = 1800
PAGE = "docs/gpu-check.md"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: there is no CUDA device here", file=sys.stderr)
        return 2
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    machine = Machine(torch.device(options.device), options.tiny, out)
    if options.one is not None:
        return _run_one(options.one, machine)
    results = Results(out / "results.json", machine)
    left = _run_all(results, options, time.monotonic() + options.budget_s)
    page = results.page(left)
    (out / "page.md").write_text(page)
    if options.device == "cuda" and not options.tiny:
        (ROOT / PAGE).write_text(page)
    print(page)
    if any(found["verdict"] == "wrong" for found in results.found.values()):
        return 1
    return 3 if left else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models and rows of a moment's work")
    parser.add_argument(
        "--out", type=Path, default=Path(".gpu-check"), help="what was found so far"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no check begins that may")
    parser.add_argument("--only", nargs="*", help="names of checks; default: all")
    parser.add_argument("--again", action="store_true", help="forget what was found before")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run_one(name: str, machine: Machine) -> int:
    """In a process of its own: what it finds goes to its file."""
    check = next(one for one in CHECKS if one.name == name)
    found = check.run(machine)
    _replace(_file_of(machine.folder, name), found.as_json())
    return 0


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Whoever waits for the file sees it whole."""
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)


def _file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-').replace(',', '')}.json"


def _code() -> str:
    """The commit, and whether files beside it were changed; the page that is written here is none
    of them, or what was found would not count any more."""
    head = commit().partition(",")[0]
    git = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", f":!{PAGE}"]
    changes = subprocess.run(git, capture_output=True, text=True, check=False)
    return head + (", with changes" if changes.stdout else "")


class Results:
    """What was found on this machine with this commit."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self.path = path
        self.machine = machine
        self.of = {"machine": machine.describe(), "commit": _code(), "tiny": machine.tiny}
        kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found: dict[str, dict[str, Any]] = kept["found"] if kept.get("of") == self.of else {}

    def add(self, name: str, finding: dict[str, Any]) -> None:
        self.found[name] = finding
        _replace(self.path, {"of": self.of, "found": self.found})

    def page(self, left: Sequence[str]) -> str:
        lines = [
            "# What was seen on a GPU",
            "",
            "Written by `make gpu-check`; do not edit.",
            "",
            f"- {datetime.now(UTC).date().isoformat()}, {self.of['machine']}, {self.of['commit']}",
        ]
        if left:
            lines.append(f"- not run yet: {', '.join(left)}")
        summary = [
            [name, found["verdict"], f"{found['seconds']:.0f}", found["said"]]
            for name, found in self.found.items()
        ]
        lines += ["", markdown(["check", "", "s", ""], summary)]
        for name, found in self.found.items():
            if found["rows"]:
                lines += [f"## {name}", "", markdown(found["header"], found["rows"])]
        return "\n".join(lines)


def _run_all(results: Results, options: argparse.Namespace, deadline: float) -> list[str]:
    """The names of those that are left."""
    wanted = [one for one in CHECKS if options.only is None or one.name in options.only]
    if options.again:
        for one in wanted:
            results.found.pop(one.name, None)
    left = []
    for check in wanted:
        if check.name in results.found:
            continue
        if time.monotonic() + check.seconds > deadline:
            left.append(check.name)
            continue
        began = time.monotonic()
        print(f"{check.name} ...", file=sys.stderr, flush=True)
        found = _in_a_process(check, options, results.machine)
        found["seconds"] = time.monotonic() - began
        print(f"{check.name}: {found['verdict']}: {found['said']}", file=sys.stderr, flush=True)
        results.add(check.name, found)
    return left


def _in_a_process(check: Check, options: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """A check that ends badly is wrong, and the others go on."""
    result = _file_of(machine.folder, check.name)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu_check", "--one", check.name]
    command += ["--device", options.device, "--out", str(machine.folder)]
    command += ["--tiny"] if options.tiny else []
    child = ChildProcess(
        check.name, command, log=result.with_suffix(".log"), env={"PYTHONPATH": str(ROOT)}
    )
    child.start()
    try:
        child.wait_until_ready(result.exists, timeout_s=3 * check.seconds)
        found: dict[str, Any] = json.loads(result.read_text())
    except (ChildError, ValueError) as error:
        found = {"verdict": "wrong", "said": str(error), "header": [], "rows": []}
    finally:
        child.stop()
    return found


if __name__ == "__main__":
    sys.exit(main())
