"""What a task's reward command said, as a number."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path, PurePosixPath

from tracegrad.events import is_reward
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.sandbox import Sandbox
from tracegrad.runner.task import RewardSource, Task

_MAX_FILE = 1 << 20  # bytes
_SUFFIXES = (".txt", ".json")
_NOT_CLEARED = 125  # as of `env` and `timeout`: it is not the command that failed


class RewardFailed(Exception):
    """What scores the attempt did not say a number; the message is why."""


def reward_line(task: Task) -> str:
    """The line for the shell. A file that the agent wrote itself is no reward: it is removed
    before."""
    assert task.reward is not None
    if task.reward_source != "file":
        return task.reward
    assert task.reward_file is not None
    files = [task.reward_file + suffix for suffix in _SUFFIXES]
    folder = str(PurePosixPath(task.reward_file).parent)
    removed = f"rm -rf -- {shlex.join(files)} && mkdir -p -- {shlex.quote(folder)}"
    return f"{removed} || exit {_NOT_CLEARED}\n{task.reward}"


async def read_reward(task: Task, said: ProcessEnd, sandbox: Sandbox, logs: Path) -> float:
    """`logs` keeps the file that it was read from. Raises RewardFailed."""
    if task.reward_source != "file":
        return printed_reward(said, task.reward_source)
    if said.exit_code is None:
        raise RewardFailed(f"the command {said.describe()}")
    if said.exit_code == _NOT_CLEARED:  # an agent may close the folder to itself: not its number
        raise RewardFailed(f"its file could not be cleared before: {said.last_line}")
    assert task.reward_file is not None
    for suffix in _SUFFIXES:
        kept = logs / f"reward{suffix}"
        try:
            await sandbox.download(task.reward_file + suffix, kept)
        except FileNotFoundError:
            continue
        return file_reward(kept)
    raise RewardFailed(
        f"the command {said.describe()} and wrote neither "
        + " nor ".join(task.reward_file + suffix for suffix in _SUFFIXES)
    )


def printed_reward(said: ProcessEnd, source: RewardSource) -> float:
    """Raises RewardFailed."""
    if source == "exit_code" and said.exit_code in (0, 1):
        return 1.0 - said.exit_code
    if source == "exit_code" or said.exit_code != 0:
        raise RewardFailed(f"the command {said.describe()}")
    try:
        value = float(said.last_line)
    except ValueError:
        raise RewardFailed(f"its last line is {said.last_line!r:.60}, which is no number") from None
    return _checked(value, "its last line is")


def file_reward(path: Path) -> float:
    """Of a text that is a number, or of JSON: a number, or an object with a `reward` or with one
    number alone. Raises RewardFailed."""
    said = f"its {path.name} holds"
    if not path.is_file() or path.stat().st_size > _MAX_FILE:
        raise RewardFailed(f"its {path.name} is no file of at most {_MAX_FILE >> 20} MiB")
    text = path.read_text(errors="replace").strip()
    if path.suffix == ".txt":
        try:
            return _checked(float(text), said)
        except ValueError:
            raise RewardFailed(f"{said} {text!r:.60}, which is no number") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise RewardFailed(f"{said} {text!r:.60}, which is no JSON") from None
    if isinstance(found, dict):
        found = found.get("reward", next(iter(found.values())) if len(found) == 1 else None)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise RewardFailed(f"{said} {text!r:.60}, which has no number as `reward`")
    return _checked(found, said)


def _checked(value: float, said: str) -> float:
    if isinstance(value, int) and abs(value) > 1 << 64:
        raise RewardFailed(f"{said} a number of {value.bit_length()} bits, which is no reward")
    if not (math.isfinite(value) and is_reward(value)):
        raise RewardFailed(f"{said} {value:g}, which is no reward")
    return float(value)
