"""`python -m bench.gpu_check`: how right and how fast everything is on this machine's GPUs.

Each check runs in a process of its own; what it found is kept, so that a run that was cut short, or
that had no time left, goes on where it stopped. What was right with the same code on the same
machine is not repeated; the rest is, behind what has not run yet. Writes one page. Ends with 0,
with 1 where something is wrong, with 2 where there is no GPU, with 3 where checks are left to run,
or lack something that they need.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
    sharing,
    speed,
)
from bench.gpu_check.check import Check, Finding, Machine
from bench.pages import ROOT, our_path
from bench.proxy.machine import commit
from bench.tables import markdown
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

# In this order: what others rest on before them, and what a quarter of an hour is worth most for.
CHECKS = (
    Check("kernels", 60, kernels.check),
    Check("collectives", 40, collectives.check),
    Check("parity", 120, parity.check),
    Check("speed", 300, speed.check),
    Check("checkpoint", 60, checkpoints.check_saved),
    Check("kill and resume", 120, resume.check),
    Check("export", 40, checkpoints.check_export),
    Check("memory estimate", 120, memory.check_estimate),
    Check("long rows", 120, memory.check_long_rows),
    Check("profile", 40, profile.check),
    Check("pushes by each transport", 120, pushes.check, needs_vllm=True),
    Check("sleep, push and wake", 120, sharing.check, needs_vllm=True),
    Check("serve, ten pushes and a kill", 420, serving.check_served, needs_vllm=True),
    Check("served precision", 225, serving.check_precision, needs_vllm=True),
)
BUDGET_S = 2100
NO_VLLM = Finding(verdict="not run", said="vLLM is not installed (pip install tracegrad[vllm])")
# What a finding is about; another version of these may do otherwise.
_CODE = ("bench", "sdk", "trainer", "examples")
_PACKAGES = ("torch", "triton", "transformers", "vllm")
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
    verdicts = {found["verdict"] for found in results.found.values()}
    if "wrong" in verdicts:
        return 1
    return 3 if left or "not run" in verdicts else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models and rows of a moment's work")
    parser.add_argument(
        "--out", type=Path, default=Path(".gpu-check"), help="folder of what was found so far"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        help="no check begins that may take longer, and none goes on; default: %(default)s",
    )
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


def _digest(root: Path) -> str:
    """Of all that is checked, committed or not."""
    found = hashlib.sha256()
    for path in sorted(_sources(root)):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def _sources(root: Path) -> Iterator[Path]:
    for folder in _CODE:
        for path in (root / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


class Results:
    """What was found on this machine with this code."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self.path = path
        self.machine = machine
        self.of = {
            "machine": machine.describe(),
            "versions": _versions(),
            "code": _digest(ROOT),
            "tiny": machine.tiny,
        }
        kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found: dict[str, dict[str, Any]] = kept["found"] if kept.get("of") == self.of else {}

    def verdict(self, name: str) -> str | None:
        return self.found[name]["verdict"] if name in self.found else None

    def add(self, name: str, finding: dict[str, Any]) -> None:
        self.found[name] = finding
        _replace(self.path, {"of": self.of, "found": self.found})

    def page(self, left: Sequence[str]) -> str:
        lines = [
            "# What was seen on a GPU",
            "",
            "Written by `make gpu-check`; do not edit.",
            "",
            f"- {datetime.now(UTC).date().isoformat()}, {self.of['machine']}, {commit()}",
            f"- {self.of['versions']}",
        ]
        if left:
            lines.append(f"- not run yet: {', '.join(left)}")
        in_order = [(one.name, self.found[one.name]) for one in CHECKS if one.name in self.found]
        summary = [
            [name, found["verdict"], f"{found['seconds']:.0f}", found["said"]]
            for name, found in in_order
        ]
        lines += ["", markdown(["check", "", "s", ""], summary)]
        for name, found in in_order:
            if found["rows"]:
                lines += [f"## {name}", "", markdown(found["header"], found["rows"])]
        return "\n".join(lines)


def _run_all(results: Results, options: argparse.Namespace, deadline: float) -> list[str]:
    """The names of those that are left."""
    wanted = [one for one in CHECKS if options.only is None or one.name in options.only]
    if options.again:
        for one in wanted:
            results.found.pop(one.name, None)
    wanted = [one for one in wanted if results.verdict(one.name) != "right"]
    wanted.sort(key=lambda one: one.name in results.found)
    for check in wanted:
        began = time.monotonic()
        if check.needs_vllm and find_spec("vllm") is None:
            found = NO_VLLM.as_json()
        elif began + check.seconds > deadline:
            continue
        else:
            print(f"{check.name} ...", file=sys.stderr, flush=True)
            timeout_s = min(3 * check.seconds, deadline - began)
            found = _in_a_process(check, options, results.machine, timeout_s)
        found["seconds"] = time.monotonic() - began
        print(f"{check.name}: {found['verdict']}: {found['said']}", file=sys.stderr, flush=True)
        results.add(check.name, found)
    return [one.name for one in wanted if one.name not in results.found]


def _in_a_process(
    check: Check, options: argparse.Namespace, machine: Machine, timeout_s: float
) -> dict[str, Any]:
    """A check that ends badly is wrong, and the others go on."""
    result = _file_of(machine.folder, check.name)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu_check", "--one", check.name]
    command += ["--device", options.device, "--out", str(machine.folder)]
    command += ["--tiny"] if options.tiny else []
    child = ChildProcess(check.name, command, log=result.with_suffix(".log"), env=our_path())
    child.start()
    try:
        child.wait_until_ready(result.exists, timeout_s=timeout_s)
        found: dict[str, Any] = json.loads(result.read_text())
    except (ChildError, ValueError) as error:
        found = {"verdict": "wrong", "said": str(error), "header": [], "rows": []}
    finally:
        child.stop()
    return found


if __name__ == "__main__":
    sys.exit(main())
