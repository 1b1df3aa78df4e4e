"""Folders of Harbor's trials and jobs: each trial's trajectory, with what its result says of it.

A trial's folder has `result.json` and `agent/trajectory.json`, which knows neither task nor reward;
a job's has a folder for each trial. Read without Harbor, as of its version 0.25.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tracegrad.events import Json
from tracegrad.transfer.jsonl import parse
from tracegrad.transfer.readers import FolderReader
from tracegrad.transfer.validation import InvalidObject
from tracegrad_integrations.harbor.outcomes import reward_of

from .foreign_rollout import object_in

_RESULT = "result.json"
_TRAJECTORY = "agent/trajectory.json"


def is_trial_or_job(folder: Path) -> bool:
    return (folder / _RESULT).is_file() or bool(_trials(folder))


def read_trials(folder: Path) -> Iterator[tuple[Path, Json | InvalidObject]]:
    """The trajectory of each trial, in order of their names. `extra` gets the task and the reward
    that it does not say itself."""
    for trial in _trials(folder) or [folder]:
        file = trial / _TRAJECTORY
        try:
            yield file, _with_result(_object(file), _object(trial / _RESULT))
        except InvalidObject as error:
            yield file, error


def _trials(folder: Path) -> list[Path]:
    return sorted(each.parent for each in folder.glob(f"*/{_RESULT}"))


def _object(file: Path) -> Json:
    """Raises InvalidObject."""
    try:
        return object_in(parse(file.read_bytes()), file.stem)
    except FileNotFoundError:
        raise InvalidObject(
            file.stem, "this trial has none; leave it out with --skip-bad"
        ) from None


def _with_result(trajectory: Json, result: Json) -> Json:
    """Raises InvalidObject."""
    rewards = (result.get("verifier_result") or {}).get("rewards")
    said = {"reward": reward_of(rewards), "task_id": result.get("task_name")}
    found = {name: value for name, value in said.items() if value is not None}
    extra = object_in(trajectory.get("extra") or {}, "extra")
    return {**trajectory, "extra": found | extra}


READER = FolderReader(name="harbor", matches=is_trial_or_job, objects=read_trials)
