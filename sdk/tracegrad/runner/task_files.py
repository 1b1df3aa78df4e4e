"""Tasks from a file of JSON lines, or from folders in Harbor's form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tracegrad.runner.harbor_tasks import CONFIG_FILE, harbor_task
from tracegrad.runner.local_sandbox import NEEDS_CONTAINER
from tracegrad.runner.sandbox import SandboxSpec
from tracegrad.runner.task import RewardSource, Task

MOST_SHOWN = 20  # wrong lines that are named


class TaskFileError(ValueError):
    """The message names each wrong line by its number and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """What tasks get that do not say it themselves. In `command`, `{prompt}` and `{task_id}` stand
    for the task's."""

    command: tuple[str, ...] | None = None
    agent: str | None = None
    timeout_s: float | None = None
    reward: str | None = None
    reward_source: RewardSource | None = None
    workspace: Path | None = None
    image: str | None = None
    tags: Mapping[str, str] | None = None


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Words = Annotated[list[str], Field(min_length=1)]


class _Line(BaseModel):
    """One task, as its line says it. Paths are relative to the file's folder."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[str, Field(min_length=1)] | None = None
    prompt: str | None = None
    command: _Words | None = None
    agent: Annotated[str, Field(min_length=1)] | None = None
    environ: dict[str, str] = {}
    timeout: _Seconds | None = None
    reward: str | None = None
    reward_from: RewardSource | None = None
    reward_timeout: _Seconds = 300.0
    reward_file: str | None = None
    reward_uploads: dict[str, str] = {}
    tags: dict[str, str] = {}
    workspace: str | None = None
    image: str | None = None
    build: str | None = None
    workdir: str | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    pids: Annotated[int, Field(gt=0)] | None = None
    user: str | None = None
    read_only: bool = False
    resettable: bool = False


def load_tasks(path: Path, defaults: TaskDefaults | None = None) -> list[Task]:
    """Of a file of JSON lines, of a folder with Harbor's task.toml, or of a folder of such folders.

    Raises TaskFileError.
    """
    defaults = defaults or TaskDefaults()
    if path.is_dir():
        found, wrong = _from_folders(path, defaults)
    else:
        found, wrong = _from_lines(path, defaults)
    where: dict[str, str] = {}
    for name, task in found:
        if task.id in where:
            wrong.append(f"{name}: id: {task.id!r} is the id of {where[task.id]}, too")
        where.setdefault(task.id, name)
    if wrong:
        more = [f"and {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else []
        raise TaskFileError("\n".join([*wrong[:MOST_SHOWN], *more]))
    if not found:
        raise TaskFileError(f"{path}: there is no task in it")
    return [task for _, task in found]


_Found = tuple[list[tuple[str, Task]], list[str]]


def _from_folders(path: Path, defaults: TaskDefaults) -> _Found:
    folders = [path] if (path / CONFIG_FILE).exists() else sorted(path.iterdir())
    found: list[tuple[str, Task]] = []
    wrong: list[str] = []
    for folder in folders:
        if not (folder / CONFIG_FILE).is_file():
            continue
        try:
            task = _with_agent(harbor_task(folder), defaults)
            wrong += [f"{folder / CONFIG_FILE}: {problem}" for problem in _problems(task)]
            found.append((str(folder), task))
        except ValueError as error:
            wrong += [f"{folder / CONFIG_FILE}: {line}" for line in str(error).splitlines()]
    return found, wrong


def _from_lines(path: Path, defaults: TaskDefaults) -> _Found:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path}: {error}") from None
    found: list[tuple[str, Task]] = []
    wrong: list[str] = []
    # Not `splitlines`: JSON's texts may hold other breaks than \n.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        name = f"{path}:{number}"
        try:
            task = _with_agent(_task_of_line(line, path.parent, defaults), defaults)
        except ValueError as error:
            wrong += [f"{name}: {problem}" for problem in str(error).splitlines()]
            continue
        wrong += [f"{name}: {problem}" for problem in _problems(task)]
        found.append((name, task))
    return found, wrong


def _task_of_line(text: str, folder: Path, defaults: TaskDefaults) -> Task:
    """Raises ValueError, a line for each wrong field."""
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    except RecursionError:
        raise ValueError("no JSON of a task: it is nested too deeply") from None
    if not isinstance(said, dict):
        raise ValueError(f"a task is an object, not {said!r:.40}")
    line = validated(_Line, said)
    source = line.reward_from or ("file" if line.reward_file else defaults.reward_source)
    return Task(
        id=line.id or _hash(said),
        command=None if line.command is None else tuple(line.command),
        agent=line.agent,
        prompt=line.prompt,
        environ=line.environ,
        timeout_s=line.timeout or defaults.timeout_s,
        reward=line.reward or defaults.reward,
        reward_source=source or "exit_code",
        reward_timeout_s=line.reward_timeout,
        reward_file=line.reward_file,
        reward_uploads={str(folder / name): to for name, to in line.reward_uploads.items()},
        tags=line.tags,
        sandbox=_sandbox(line, folder, defaults),
    )


def _sandbox(line: _Line, folder: Path, defaults: TaskDefaults) -> SandboxSpec:
    own = line.image is not None or line.build is not None
    return SandboxSpec(
        image=line.image if own else defaults.image,
        build=None if line.build is None else folder / line.build,
        workspace=defaults.workspace if line.workspace is None else folder / line.workspace,
        workdir=line.workdir,
        cpus=line.cpus,
        memory_mb=line.memory_mb,
        pids=line.pids,
        user=line.user,
        read_only=line.read_only,
        resettable=line.resettable,
    )


def _with_agent(task: Task, defaults: TaskDefaults) -> Task:
    """Who works on it: the task's own command or agent, else that of the command line."""
    tags = {**(defaults.tags or {}), **task.tags}
    if task.command is not None or (task.agent is not None and defaults.command is None):
        return replace(task, tags=tags)
    if defaults.command is None:
        return replace(task, tags=tags, agent=defaults.agent)
    known = {"{prompt}": task.prompt or "", "{task_id}": task.id}
    # All at once: a prompt may hold what looks like a placeholder.
    words = (
        re.sub(r"\{(prompt|task_id)\}", lambda found: known[found[0]], word)
        for word in defaults.command
    )
    name = task.agent or defaults.agent or Path(defaults.command[0]).name
    return replace(task, tags=tags, command=tuple(words), agent=name)


def _problems(task: Task) -> Iterator[str]:
    """What no field says by itself."""
    spec = task.sandbox
    if task.command is None and task.agent is None:
        yield "command: there is neither a command nor an agent; or give them to `tracegrad run`"
    if task.command is None and task.agent is not None and task.prompt is None:
        yield "prompt: an agent needs one"
    if task.reward_source == "file" and task.reward_file is None:
        yield "reward_file: reward_from is file"
    if task.reward is None and (task.reward_file or task.reward_uploads):
        yield "reward: there is none that would write the reward_file, or see the reward_uploads"
    if spec.image is not None and spec.build is not None:
        yield "image: there is build, too"
    for name, folder in (("workspace", spec.workspace), ("build", spec.build)):
        if folder is not None and not folder.is_dir():
            yield f"{name}: {folder} is no folder"
    for source in task.reward_uploads:
        if not Path(source).exists():
            yield f"reward_uploads: there is no {source}"
    yield from _container_problems(task)


def _container_problems(task: Task) -> Iterator[str]:
    """What needs one, and there is none."""
    spec = task.sandbox
    if spec.image is not None or spec.build is not None:
        return
    for name in NEEDS_CONTAINER:
        if getattr(spec, name) not in (None, False):
            yield f"{name}: needs image or build"
    inside = [*task.reward_uploads.values(), task.reward_file or ""]
    for path in inside:
        if path.startswith("/") or ".." in Path(path).parts:
            yield f"reward_file or reward_uploads: {path} leads out of the attempt's folder"


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(model: type[ModelT], said: Mapping[str, Any]) -> ModelT:
    """Raises ValueError, a line `field: what is wrong` for each."""
    try:
        return model.model_validate(said)
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, each['loc'])) or 'task'}: {_worded(each)}"
            for each in error.errors(include_url=False)
        )
        raise ValueError("\n".join(lines)) from None


def _worded(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such field"
    return f"{error['msg'].lower()}, got {error['input']!r:.60}"


def _hash(said: Mapping[str, Any]) -> str:
    """Of its content: the same line is the same task, wherever it stands."""
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
