"""Tasks from a file of JSON lines, or from folders in Harbor's form."""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from tracegrad.runner.harbor_tasks import CONFIG_FILE, harbor_task
from tracegrad.runner.local_sandbox import NEEDS_CONTAINER
from tracegrad.runner.sandbox import SandboxSpec
from tracegrad.runner.task import RewardSource, Task

MOST_SHOWN = 20  # wrong lines that are named
_NO_JSON = "no JSON"


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


@dataclass(frozen=True, slots=True)
class _Kind:
    """`what`: a value is to be."""

    what: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and 0 < value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(w, str) for w in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_TEXT, _NUMBER = _Kind("a text", _is_text), _Kind("a number above 0", _is_number)
_COUNT, _TEXTS = _Kind("a count", _is_count), _Kind("texts by name", _is_texts)
_WORDS = _Kind('a list of words, such as ["./agent", "--fast"]', _is_words)
_TRUTH = _Kind("true or false", lambda value: isinstance(value, bool))
_SOURCE = _Kind(
    f"one of {', '.join(get_args(RewardSource))}", lambda value: value in get_args(RewardSource)
)
# What JSON can spell and no process, store or proxy takes. A command line may have bytes that are
# no UTF-8, which are single surrogates here.
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
# Of a task's line. Paths are relative to the file's folder.
_FIELDS: Mapping[str, _Kind] = {
    "id": _TEXT,
    "prompt": _Kind("a text", lambda value: isinstance(value, str)),
    "command": _WORDS,
    "agent": _TEXT,
    "environ": _TEXTS,
    "timeout": _NUMBER,
    "reward": _TEXT,
    "reward_from": _SOURCE,
    "reward_timeout": _NUMBER,
    "reward_file": _TEXT,
    "reward_uploads": _TEXTS,
    "tags": _TEXTS,
    "workspace": _TEXT,
    "image": _TEXT,
    "build": _TEXT,
    "workdir": _TEXT,
    "cpus": _NUMBER,
    "memory_mb": _COUNT,
    "pids": _COUNT,
    "user": _TEXT,
    "read_only": _TRUTH,
    "resettable": _TRUTH,
}


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
    if wrong and not found and all(_NO_JSON in problem for problem in wrong):
        wrong = [f"{wrong[0]}; a task is an object on one line, and before a command stands --"]
    return found, wrong


def _task_of_line(text: str, folder: Path, defaults: TaskDefaults) -> Task:
    """Raises ValueError, a line for each wrong field."""
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{_NO_JSON}: {error}") from None
    except RecursionError:
        raise ValueError("no JSON of a task: it is nested too deeply") from None
    if not isinstance(said, dict):
        raise ValueError(f"a task is an object, not {said!r:.40}")
    if wrong := [*_wrong_fields(said)]:
        raise ValueError("\n".join(wrong))
    source: RewardSource | None = said.get("reward_from")
    if source is None and "reward_file" in said:
        source = "file"
    command = said.get("command")
    return Task(
        id=said.get("id") or _hash(said),
        command=None if command is None else tuple(command),
        agent=said.get("agent"),
        prompt=said.get("prompt"),
        environ=said.get("environ", {}),
        timeout_s=said.get("timeout", defaults.timeout_s),
        reward=said.get("reward", defaults.reward),
        reward_source=source or defaults.reward_source or "exit_code",
        reward_timeout_s=said.get("reward_timeout", 300.0),
        reward_file=said.get("reward_file"),
        reward_uploads={
            str(folder / name): to for name, to in said.get("reward_uploads", {}).items()
        },
        tags=said.get("tags", {}),
        sandbox=_sandbox(said, folder, defaults),
    )


def _wrong_fields(said: Mapping[str, Any]) -> Iterator[str]:
    for name, value in said.items():
        if name not in _FIELDS:
            close = get_close_matches(name, _FIELDS, n=1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(_FIELDS)}"
            yield f"{name}: there is no such field; {fix}"
        elif not _FIELDS[name].fits(value):
            yield f"{name}: {value!r:.60} is not {_FIELDS[name].what}"


def _sandbox(said: Mapping[str, Any], folder: Path, defaults: TaskDefaults) -> SandboxSpec:
    own = "image" in said or "build" in said
    return SandboxSpec(
        image=said.get("image") if own else defaults.image,
        build=folder / said["build"] if "build" in said else None,
        workspace=folder / said["workspace"] if "workspace" in said else defaults.workspace,
        workdir=said.get("workdir"),
        cpus=said.get("cpus"),
        memory_mb=said.get("memory_mb"),
        pids=said.get("pids"),
        user=said.get("user"),
        read_only=said.get("read_only", False),
        resettable=said.get("resettable", False),
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
    for source, target in task.reward_uploads.items():
        if not Path(source).exists():
            yield f"reward_uploads: there is no {source}"
        if posixpath.basename(posixpath.normpath(target)) in ("", ".", ".."):
            yield f"reward_uploads: {target!r} would be replaced as a whole: name what is in it"
    yield from _text_problems(task)
    yield from _container_problems(task)


def _text_problems(task: Task) -> Iterator[str]:
    """What no process can be given."""
    environs = {"environ": task.environ, "reward_environ": task.reward_environ}
    texts: Mapping[str, Iterable[str]] = {
        "id": [task.id],
        "prompt": [task.prompt or ""],
        "reward": [task.reward or ""],
        "reward_file": [task.reward_file or ""],
        "reward_uploads": task.reward_uploads.values(),
        "tags": [*task.tags, *task.tags.values()],
        **{name: [*values, *values.values()] for name, values in environs.items()},
    }
    for name, said in texts.items():
        if wrong := [text for text in said if _NOT_TEXT.search(text)]:
            yield f"{name}: {wrong[0]!r:.60} holds a zero character, or half of a surrogate pair"
    if wrong := [word for word in task.command or () if "\0" in word]:
        yield f"command: {wrong[0]!r:.60} holds a zero character"
    for name, values in environs.items():
        if wrong := [each for each in values if not each or "=" in each]:
            yield f"{name}: {wrong[0]!r:.60} is no name of a variable"


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


def _hash(said: Mapping[str, Any]) -> str:
    """Of its content: the same line is the same task, wherever it stands."""
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
