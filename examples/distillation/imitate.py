"""The student imitates what the teacher did well: `trainer sft` over the recorded traces."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.shop.screen import Screen

from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

from .record import Recording


@dataclass(frozen=True, slots=True)
class Imitation:
    """`losses`: on held-out tasks of the traces, before the first step and after each epoch."""

    model: Path
    data: Mapping[str, Any]  # what is learnt, what is left out and why
    losses: tuple[float, ...]
    steps: int


def command(model: Path, recording: Recording, folder: Path, *, epochs: int) -> list[str]:
    """Only what was right is imitated: a teacher's mistakes are left out and counted."""
    return [
        *(sys.executable, "-m", "tracegrad_trainer", "sft", "--json"),
        *("--model", str(model), "--store", recording.store, "--state-dir", str(folder)),
        *("--tag", "split=train", "--min-reward", "1"),
        *("--epochs", str(epochs), "--lr", "3e-4", "--tokens-per-step", "2048"),
        *("--ranks", "1", "--set", "fsdp.threads=1", "--out", str(folder / "model")),
    ]


def imitate(
    model: Path, recording: Recording, folder: Path, screen: Screen, *, epochs: int
) -> Imitation:
    """Raises ChildError, one line, if the run fails."""
    log = folder / "logs" / "sft-command.log"
    asked = command(model, recording, folder, epochs=epochs)
    child = ChildProcess("trainer sft", asked, log=log)
    with screen.phase("trainer sft, on the teacher's traces") as phase:
        child.start()
        try:
            while child.exit_code() is None:
                phase.update(note=describe(records(child.logged())))
                time.sleep(0.2)
        finally:
            child.stop(grace_s=20)
        found = records(child.logged())
        phase.note = describe(found)
    if failed := [record for record in found if record["event"] == "failed"]:
        raise ChildError(f"trainer sft: {failed[0]['error']} (log: {log})")
    if child.exit_code() != 0:
        child.check()
    return result(found, folder / "model")


def records(logged: str) -> list[dict[str, Any]]:
    """The lines of JSON among what the command printed; a last one may be half there."""
    found = []
    for line in logged.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record:
            found.append(record)
    return found


def result(found: list[dict[str, Any]], model: Path) -> Imitation:
    data = next((record for record in found if record["event"] == "data"), {})
    losses = tuple(record["loss"] for record in found if record["event"] == "held_out")
    steps = max((record["step"] for record in found if record["event"] == "step"), default=0)
    return Imitation(model, data, losses, steps)


def describe(found: list[dict[str, Any]]) -> str:
    done = result(found, Path())
    losses = " → ".join(f"{loss:.2f}" for loss in done.losses)
    return f"{done.steps} steps" + (f"  held-out loss {losses}" if losses else "")
