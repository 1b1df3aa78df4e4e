"""`trainer step` killed with SIGKILL between two checkpoints and started again: the steps of a run
that nobody killed, as far as the device's kernels repeat themselves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu_check.check import Finding, Machine, judged
from bench.trainer.rollouts import MIXED, tasks
from bench.trainer.served_precision import VOCABULARY, save_small_model
from tracegrad.events import Event, Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad_trainer.launch.run_state import read_state

# A GPU makes a step in tens of milliseconds: some must be left when it is killed.
STEPS, TINY_STEPS, KILLED_AT = 20, 6, 2
BOUND = 1e-3


def check(machine: Machine) -> Finding:
    root = machine.folder / "resume"
    shutil.rmtree(root, ignore_errors=True)
    save_small_model(root / "model")
    whole, killed = root / "whole", root / "killed"
    steps = TINY_STEPS if machine.tiny else STEPS
    for state in (whole, killed):
        _fill(state, steps)
    _run(machine, root, whole, steps).wait()
    first = _run(machine, root, killed, steps)
    while first.poll() is None and len(_steps(killed)) < KILLED_AT:
        time.sleep(0.02)
    cut_short = first.poll() is None
    if cut_short:
        _kill(first, killed)
    first.wait()
    before = len(_steps(killed))
    _run(machine, root, killed, steps).wait()
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


def _kill(command: subprocess.Popen[bytes], state: Path) -> None:
    """Rank 0 too, which the command's end alone would ask to save and to stop."""
    os.kill(command.pid, signal.SIGSTOP)  # or it would look after the rank
    os.kill(int((read_state(state, "ranks") or {})["pid"]), signal.SIGKILL)
    os.killpg(command.pid, signal.SIGKILL)


def _steps(state: Path) -> list[StepRecord]:
    with Store.open(f"sqlite:///{state}/store.db", create=False) as store:
        return Ledger(store).steps()
