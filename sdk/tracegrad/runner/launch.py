"""What one attempt starts: a recipe with everything filled in that only the attempt knows."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from tracegrad.client_environ import client_variables
from tracegrad.runner.recipe import Recipe
from tracegrad.runner.task import AgentCommand

# What agents may see of the runner's own environment, where they run as processes beside it. All
# else stays out: a user's keys and settings (ANTHROPIC_MODEL, XDG_CONFIG_HOME, …) are not the
# attempt's.
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "SHELL")
# Linux takes no longer word of a command or variable (MAX_ARG_STRLEN), its final zero included.
MAX_WORD_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchValues:
    """What a recipe's placeholders stand for in one attempt: paths and addresses as the agent
    sees them."""

    prompt: str
    model: str
    base_url: str  # ends in /v1
    api_key: str
    home: str
    workdir: str
    session_id: str

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")


def make_launch(
    recipe: Recipe,
    values: LaunchValues,
    *,
    environ: Mapping[str, str | None] = MappingProxyType({}),
) -> AgentCommand:
    """The command, environment and files of one attempt; the files' paths are absolute.

    `environ`: what the place where it runs is to have besides (`local_environ`). Raises ValueError
    where Linux would not start it.
    """
    known = {**asdict(values), "root_url": values.root_url}
    given = {**environ, **client_variables(values.base_url, values.api_key)}
    if recipe.home:
        given["HOME"] = values.home
    given |= {name: _fill(text, known) for name, text in recipe.environ.items()}
    launch = AgentCommand(
        command=tuple(_substitute(word, known) for word in recipe.command),
        environ=given,
        files={
            str(PurePosixPath(values.home) / _substitute(path, known)): _fill(text, known, path)
            for path, text in recipe.files.items()
        },
    )
    _check(recipe, launch)
    return launch


def local_environ(
    recipe: Recipe, own: Mapping[str, str], *, search_path: Sequence[str], temp: str
) -> dict[str, str | None]:
    """What is changed of the runner's `own` environment for an agent that runs as a process beside
    it: its programs are found, its temporary files go to `temp`, and what is not its business is
    not there."""
    inherited = {*INHERITED, *recipe.inherit}
    hidden = dict.fromkeys(name for name in own if name not in inherited)
    path = os.pathsep.join([*search_path, own.get("PATH", os.defpath)])
    # tmux keeps its sockets apart from all else.
    return {**hidden, "PATH": path, "TERM": "dumb", "TMPDIR": temp, "TMUX_TMPDIR": temp}


def session_id(rollout_id: str) -> str:
    """A UUID, always the same one for a rollout."""
    try:
        return str(uuid.UUID(rollout_id))
    except ValueError:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, rollout_id))


def _fill(text: str, values: Mapping[str, str], path: str = "") -> str:
    """With each value written as the text's format wants it: in JSON, and within quotes in files
    *.json, *.toml and *.yaml, for a model's name or a prompt may hold quotes and line breaks."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict | list):
        return json.dumps(_fill_json(found, values))
    if path.endswith((".json", ".toml", ".yaml", ".yml")):
        # TOML and YAML in double quotes take JSON's escapes, but for surrogates.
        quoted = {name: json.dumps(each, ensure_ascii=False)[1:-1] for name, each in values.items()}
        return _substitute(text, {n: each.replace("\x7f", "\\u007F") for n, each in quoted.items()})
    return _substitute(text, values)


def _fill_json(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _substitute(value, values)
    if isinstance(value, list):
        return [_fill_json(each, values) for each in value]
    if isinstance(value, dict):
        return {_substitute(name, values): _fill_json(each, values) for name, each in value.items()}
    return value


def _substitute(text: str, values: Mapping[str, str]) -> str:
    """All at once: a prompt may hold what looks like another placeholder."""

    def value(found: re.Match[str]) -> str:
        return values[found[1]]

    return re.sub(rf"\{{({'|'.join(values)})\}}", value, text)


def _check(recipe: Recipe, launch: AgentCommand) -> None:
    words = [*launch.command, *(f"{name}={text}" for name, text in launch.environ.items())]
    if any("\0" in word for word in words):
        raise ValueError(f"{recipe.name}: prompt: it holds a zero character; leave it out")
    if (
        most := max(len(word.encode(errors="surrogateescape")) for word in words)
    ) >= MAX_WORD_BYTES:
        raise ValueError(
            f"{recipe.name}: prompt: {most} bytes in one word of its command, and Linux takes"
            f" {MAX_WORD_BYTES - 1}; write it to a file of the workspace, and ask to read that"
        )
