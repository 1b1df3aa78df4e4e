"""The test's side of `killed_process`: killed runs and what they left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import select
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.system.module_environment import environment
from support.trainer.prepared_run import steps_of
from tracegrad.store import Store
from tracegrad.store.models import TurnLedger
from tracegrad_trainer.metrics import find_metric


class Runs:
    """Makes one run of a program's ranks after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.trainer.killed_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), "OMP_NUM_THREADS": "1"},
        )

    def run(self, settings: Path, **order: Any) -> list[int]:
        """-> the exit status of each rank; negative: the signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        every = {
            "program": "step",
            "ranks": 1,
            "steps": None,
            "after_s": None,
            "at": None,
            "nth": 1,
        }
        every |= {"linger_s": 0.0, "alone": False, "settings": str(settings), "env": {}}
        self._process.stdin.write(json.dumps(every | order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the ranks' parent died: {log_of(settings)}"
        statuses: list[int] = json.loads(line)
        return statuses

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def step_runs() -> Iterator[Runs]:
    runs = Runs()
    try:
        yield runs
    finally:
        runs.close()


def log_of(settings: Path) -> str:
    """The end of what the ranks said."""
    log = Path(f"{settings}.log")
    return log.read_text()[-3000:] if log.exists() else ""


# Settings that may differ between runs that are to be the same.
_OWN = ("state_dir", "proxy", "vllm", "checkpoint")


def made(url: str) -> list[dict[str, Any]]:
    """The steps as they are recorded, but for what the clock says."""
    return [
        {
            "step": step.step,
            "version": step.version,
            "batch": step.batch,
            "metrics": {name: v for name, v in step.metrics.items() if not _of_the_clock(name)},
            "settings": {name: v for name, v in step.settings.items() if name not in _OWN},
        }
        for step in steps_of(url)
    ]


def _of_the_clock(name: str) -> bool:
    known = find_metric(name)
    return name == "seconds" or (known is not None and known.clock)


def fates(url: str) -> dict[str, tuple[int | None, str | None]]:
    """Turn -> what the ledger says of it; a turn has at most one row there."""
    query = select(TurnLedger.turn_id, TurnLedger.step, TurnLedger.skip_reason)
    with Store.open(url, create=False) as store, store.reading() as connection:
        return {turn: (step, reason) for turn, step, reason in connection.execute(query)}


def state_of(folder: Path, scratch: Path) -> dict[str, Any]:
    """All that a checkpoint holds, whole: weights, optimizer, random numbers."""
    dcp_to_torch_save(folder, scratch)
    state: dict[str, Any] = torch.load(scratch, weights_only=False)
    return state


def same(a: Any, b: Any, place: str = "") -> None:
    """AssertionError naming the first place where two states differ in a bit."""
    assert type(a) is type(b), place
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{place}: {a.keys() ^ b.keys()}"
        for name in a:
            same(a[name], b[name], f"{place}/{name}")
    elif isinstance(a, list):
        assert len(a) == len(b), place
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{place}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), place
    else:
        assert a == b, f"{place}: {a} != {b}"
