"""`trainer step` killed with SIGKILL between two checkpoints and started again: the steps of a run
that nobody killed, as far as the device's kernels repeat themselves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
    cut_short = any(taken >= KILLED_AT for taken in _taken(first, killed))
    if cut_short:
        _kill(first, killed)
    first.wait()
    before = len(_steps(killed))
    _finish(_run(machine, root, killed, steps), killed)
    expected, found = _steps(whole), _steps(killed)
    rows = [
        [str(a.step), f"{a.metrics['loss']:.6g}", f"{b.metrics['loss']:.6g}"]
        for a, b in zip(expected, found, strict=False)
    ]
    alike = [abs(float(a) - float(b)) <= BOUND * max(1.0, abs(float(a))) for _, a, b in rows]
    right = cut_short and len(expected) == len(found) == steps and all(alike)
    said = f"killed after {before} of {steps} steps; {sum(alike)} of {len(rows)} losses agree"
    return judged(right, said, ("step", "loss", "loss of the killed run"), rows)


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
