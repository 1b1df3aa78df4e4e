"""`trainer step` killed with SIGKILL between two checkpoints and started again: the steps of a run
that nobody killed, as far as the device's kernels repeat themselves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.gpu_check.check import Finding, Machine, judged
from bench.trainer.rollouts import MIXED, tasks
from bench.trainer.served_precision import VOCABULARY, save_small_model
from tracegrad.events import Event, Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad_trainer.launch.run_state import read_state

# A GPU makes a step in tens of milliseconds: some must be left when it is killed.
STEPS, TINY_STEPS, KILLED_AT = 20, 6, 2
BOUND = 1e-3
# Lost weights change all three; lost moments, or a wrong step number, those of later steps.
_COMPARED = ("loss", "entropy", "grad_norm")
# Between two steps, or a start and the first: the CPU seconds that a run may use, which a slow
# machine uses no more of, and the seconds in which it may use none.
STEP_CPU_S, STILL_S = 600.0, 180.0


def check(machine: Machine) -> Finding:
    root = machine.folder / "resume"
    shutil.rmtree(root, ignore_errors=True)
    save_small_model(root / "model")
    whole, killed = root / "whole", root / "killed"
    steps = TINY_STEPS if machine.tiny else STEPS
    for state in (whole, killed):
        _fill(state, steps)
    _finish(_run(machine, root, whole, steps), whole)
    first = _run(machine, root, killed, steps)
    if any(taken >= KILLED_AT for taken in _taken(first, killed)):
        _kill(first, killed)
    first.wait()
    before = len(_steps(killed))
    _finish(_run(machine, root, killed, steps), killed)
    expected, found = ([one.metrics for one in _steps(state)] for state in (whole, killed))
    return judge_resumed(before, steps, expected, found)


def judge_resumed(
    before: int,
    steps: int,
    expected: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
) -> Finding:
    """Right: it was killed between two steps, and all its steps are those of the whole run."""
    rows, alike = [], 0
    for number, (a, b) in enumerate(zip(expected, found, strict=False), 1):
        pairs = [(float(a[name]), float(b[name])) for name in _COMPARED]
        alike += all(abs(x - y) <= BOUND * max(1.0, abs(x)) for x, y in pairs)
        rows.append([str(number), *(f"{value:.6g}" for pair in pairs for value in pair)])
    cut_short = KILLED_AT <= before < steps
    right = cut_short and len(expected) == len(found) == steps == alike
    said = f"killed after {before} of {steps} steps; {alike} of {len(rows)} agree"
    header = ("step", *(name for one in _COMPARED for name in (one, f"{one} of the killed run")))
    return judged(right, said, header, rows)


def _fill(state: Path, steps: int) -> None:
    state.mkdir(mode=0o700)
    events: list[Event] = []
    for task in tasks(MIXED, 2 * steps, 4, VOCABULARY):
        for one in task.rollouts:
            name = one.rollout_id
            events += [
                RolloutStarted(rollout_id=name, task_id=task.group_id, opened_at=1.0),
                *one.turns,
                Reward(rollout_id=name, value=one.reward, created_at=2.0),
                RolloutFinished(rollout_id=name, outcome=Outcome.COMPLETED, finished_at=3.0),
            ]
    with Store.open(f"sqlite:///{state}/store.db") as store:
        store.append(events)


def _run(machine: Machine, root: Path, state: Path, steps: int) -> subprocess.Popen[bytes]:
    settings = {
        "model": root / "model",
        "state_dir": state,
        "ranks": 1,
        "batches.groups": 2,
        "batches.group_size": 4,
        "batches.max_staleness": "null",
        "batches.tokens_per_micro_batch": 2048,
        "checkpoint.every_steps": 2,
        "fsdp.device": machine.fsdp_device,
        "fsdp.compute_dtype": "float32",
    }
    command = [sys.executable, "-m", "tracegrad_trainer", "step", "--steps", str(steps)]
    sets = [f"--set={name}={value}" for name, value in settings.items()]
    with (root / f"{state.name}.log").open("ab") as log:
        return subprocess.Popen([*command, *sets], stdout=log, stderr=log, start_new_session=True)


def _finish(command: subprocess.Popen[bytes], state: Path) -> None:
    for _ in _taken(command, state):
        pass


def _taken(command: subprocess.Popen[bytes], state: Path) -> Iterator[int]:
    """How many steps are taken, again and again while the run goes on.

    Raises:
        TimeoutError: it makes no progress; it is killed.
    """
    steps, at_step, used, moved_at = len(_steps(state)), 0.0, 0.0, time.monotonic()
    while command.poll() is None:
        now, cpu = time.monotonic(), _cpu_seconds(command.pid)
        if cpu != used:  # less, where one has ended
            used, moved_at = cpu, now
        if (found := len(_steps(state))) > steps:
            steps, at_step = found, used
        if used - at_step > STEP_CPU_S or now - moved_at > STILL_S:
            _kill(command, state)
            command.wait()
            raise TimeoutError(
                f"{state.name}: after {steps} steps none for {used - at_step:.0f} CPU seconds;"
                f" the last {now - moved_at:.0f} s it used none"
            )
        yield steps
        time.sleep(0.02)


def _cpu_seconds(pid: int) -> float:
    """Of a process and those that it started, which still run."""
    found = 0.0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found += times.user + times.system
    return found


def _kill(command: subprocess.Popen[bytes], state: Path) -> None:
    """Rank 0 too, which the command's end alone would ask to save and to stop."""
    os.kill(command.pid, signal.SIGSTOP)  # or it would look after the rank
    with suppress(KeyError, ProcessLookupError):  # it has not begun yet
        os.kill(int((read_state(state, "ranks") or {})["pid"]), signal.SIGKILL)
    os.killpg(command.pid, signal.SIGKILL)


def _steps(state: Path) -> list[StepRecord]:
    with Store.open(f"sqlite:///{state}/store.db", create=False) as store:
        return Ledger(store).steps()
