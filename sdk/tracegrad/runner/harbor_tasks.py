"""Tasks in Harbor's form (harborframework.com, schema 1.4): a folder with `task.toml`,
`instruction.md`, `environment/` and `tests/`, whose test.sh writes the reward.

What a task asks for and sandboxes here do not have is an error that names it: it would be another
task without it. Not honoured are a public network (`network_mode`), which none has, and bounds of
the disk (`storage_mb`).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracegrad.runner.sandbox import SandboxSpec
from tracegrad.runner.task import Task

CONFIG_FILE = "task.toml"
# Where Harbor's tests find and leave things, inside.
TESTS, REWARD_FILE = "/tests", "/logs/verifier/reward"
_REWARD = "mkdir -p /logs/agent /logs/artifacts; chmod +x /tests/test.sh && /tests/test.sh"
_VERIFIER_TIMEOUT_S = 600.0
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
# Key -> why a task that has it cannot be run here.
_UNSUPPORTED: Mapping[tuple[str, ...], str] = {
    ("steps",): "tasks of several steps are not supported",
    ("environment", "gpus"): "sandboxes have no GPU",
    ("environment", "tpu"): "sandboxes have no TPU",
    ("environment", "mcp_servers"): "servers of MCP beside the agent are not supported",
    ("environment", "healthcheck"): "health checks are not supported",
    ("environment", "skills_dir"): "skills are not supported",
    ("verifier", "environment"): "an environment of the verifier's own is not supported",
    ("verifier", "collect"): "collectors of services are not supported",
}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


def harbor_task(folder: Path) -> Task:
    """Its agent, and its command, are whoever's who runs it.

    Raises ValueError, a line `key: what is wrong` for each problem.
    """
    config = _config(folder / CONFIG_FILE)
    wrong = [*_problems(config, folder)]
    reader = _Reader(config, wrong)
    environment = folder / "environment"
    image = reader.text("environment", "docker_image")
    if image is None and not (environment / "Dockerfile").is_file():
        wrong.append("environment.docker_image: there is none, and no environment/Dockerfile")
    memory = reader.number("environment", "memory_mb") or _megabytes(config, wrong)
    task = Task(
        id=reader.text("task", "name") or folder.resolve().name,
        prompt=_instruction(folder, wrong),
        environ=reader.variables("environment"),
        timeout_s=reader.number("agent", "timeout_sec"),
        reward=_REWARD,
        reward_source="file",
        reward_file=REWARD_FILE,
        reward_timeout_s=reader.number("verifier", "timeout_sec") or _VERIFIER_TIMEOUT_S,
        reward_uploads={str(folder / "tests"): TESTS},
        reward_environ=reader.variables("verifier"),
        sandbox=SandboxSpec(
            image=image,
            build=None if image is not None else environment,
            workdir=reader.text("environment", "workdir"),
            cpus=reader.number("environment", "cpus"),
            memory_mb=None if memory is None else int(memory),
            user=reader.user(),
        ),
    )
    if wrong:
        raise ValueError("\n".join(wrong))
    return task


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"task.toml: {error}") from None


def _problems(config: Mapping[str, Any], folder: Path) -> Iterator[str]:
    for keys, why in _UNSUPPORTED.items():
        if _at(config, *keys):
            yield f"{'.'.join(keys)}: {why}"
    if str(_at(config, "environment", "os") or "linux").lower() != "linux":
        yield "environment.os: Linux alone is supported"
    if str(_at(config, "verifier", "environment_mode") or "shared").lower() != "shared":
        yield "verifier.environment_mode: shared alone is supported"
    for name in _COMPOSE:
        if (folder / "environment" / name).exists():
            yield f"environment: {name}: several containers are not supported"
    if not (folder / "tests" / "test.sh").is_file():
        yield "tests: there is no tests/test.sh"


def _instruction(folder: Path, wrong: list[str]) -> str:
    try:
        return (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wrong.append(f"instruction.md: {error}")
        return ""


def _megabytes(config: Mapping[str, Any], wrong: list[str]) -> float | None:
    """Of the older spelling, `memory = "2G"`."""
    said = _at(config, "environment", "memory")
    if said is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+)\s*([GMK])\s*", str(said).upper())
    if found is None:
        wrong.append(f"environment.memory: {said!r} is no size such as 2G or 512M")
        return None
    return float(found[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[found[2]]


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


class _Reader:
    """Values of the file; what is wrong with them is added to `wrong`."""

    def __init__(self, config: Mapping[str, Any], wrong: list[str]) -> None:
        self._config, self._wrong = config, wrong

    def text(self, *keys: str) -> str | None:
        found = _at(self._config, *keys)
        if found is None or (isinstance(found, str) and found):
            text: str | None = found
            return text
        self._wrong.append(f"{'.'.join(keys)}: {found!r:.40} is no text")
        return None

    def number(self, *keys: str) -> float | None:
        found = _at(self._config, *keys)
        if found is None:
            return None
        if isinstance(found, int | float) and not isinstance(found, bool) and found > 0:
            return float(found)
        self._wrong.append(f"{'.'.join(keys)}: {found!r:.40} is no number above 0")
        return None

    def user(self) -> str | None:
        """Of the agent; the verifier's has to be the same."""
        agent, verifier = (_at(self._config, part, "user") for part in ("agent", "verifier"))
        if verifier is not None and verifier != agent:
            self._wrong.append("verifier.user: another one than the agent's is not supported")
        return None if agent is None else str(agent)

    def variables(self, part: str) -> dict[str, str]:
        """`env`, with ${NAME} and ${NAME:-default} from this process's environment."""
        said: Any = _at(self._config, part, "env") or {}
        if not isinstance(said, Mapping):
            self._wrong.append(f"{part}.env: {said!r:.40} is no table")
            return {}
        return {name: self._filled(part, name, str(text)) for name, text in said.items()}

    def _filled(self, part: str, name: str, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            default: str | None = found[2]
            given = os.environ.get(found[1], default)
            if given is None:
                self._wrong.append(f"{part}.env.{name}: {found[1]} is not set here")
            return given or ""

        return _VARIABLE.sub(value, text)
