"""A sandbox of ours as Harbor's environment: where its agents and verifiers run their commands."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy

from tracegrad.runner.agent_layer import starter
from tracegrad.runner.recipe import Recipe
from tracegrad.runner.sandbox import Sandbox, SandboxBackend, SandboxSpec

IMPORT_PATH = f"{__name__}:SandboxEnvironment"
_ROOT = (None, "root", 0, "0")


@dataclass(slots=True)
class _Opened:
    """Of one trial. `sandbox` is the first environment's; None: it has been taken."""

    backend: SandboxBackend
    sandbox: Sandbox | None
    host: str
    recipe: Recipe | None


_opened: dict[str, _Opened] = {}


@contextmanager
def environments_of(
    key: str, backend: SandboxBackend, sandbox: Sandbox, *, host: str, recipe: Recipe | None
) -> Iterator[None]:
    """While it lasts, the trial whose environments are made with `sandbox=key` runs in `sandbox`;
    what it wants besides (a verifier's own) is started by `backend`.

    `host`: the only one that is reached from inside. `recipe`: the agent that is baked in.
    """
    _opened[key] = _Opened(backend, sandbox, host, recipe)
    try:
        yield
    finally:
        del _opened[key]


def sandbox_spec(
    config: EnvironmentConfig, folder: Path, recipe: Recipe | None = None
) -> SandboxSpec:
    """`folder`: with the Dockerfile, where `config` names no image. Raises ValueError."""
    if (folder / "docker-compose.yaml").exists():
        raise ValueError(f"{folder}: docker-compose.yaml: a task has one container here")
    image = config.docker_image
    if image is None and not (folder / "Dockerfile").exists():
        raise ValueError(f"{folder}: it has no Dockerfile, and task.toml no docker_image")
    return SandboxSpec(
        image=image,
        build=None if image is not None else folder,
        recipe=None if recipe is None else recipe.id,
        workdir=config.workdir,
        cpus=config.cpus,
        memory_mb=config.memory_mb,
        user="0:0",  # who else a command is for, it says itself
    )


class SandboxEnvironment(BaseEnvironment):  # type: ignore[misc]
    """Both streams of a command come as its standard output. What a command leaves running ends
    with it."""

    def __init__(self, *args: Any, sandbox: str, **kwargs: Any) -> None:
        """`sandbox`: the key of `environments_of`."""
        self._trial = _opened[sandbox]
        self._sandbox: Sandbox | None = None
        self._recipe: Recipe | None = None
        self._commands = 0
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "tracegrad"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_ipv4_addresses=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(
            cpu_limit=True, memory_limit=True, fractional_cpus=True
        )

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        """Raises ValueError: there is no way to any host but the proxy's."""
        super().validate_network_policy_support(network_policy)
        policy = network_policy or self._network_policy
        if policy.network_mode == NetworkMode.ALLOWLIST:
            others = sorted({*policy.allowed_hosts} - {self._trial.host})
            if others:
                raise ValueError(f"allowed_hosts: {', '.join(others)}: only the proxy is reached")

    def _validate_definition(self) -> None:
        sandbox_spec(self.task_env_config, self.environment_dir)

    async def start(self, force_build: bool) -> None:
        """Raises SandboxError."""
        self._sandbox, self._trial.sandbox = self._trial.sandbox, None
        if self._sandbox is not None:
            self._recipe = self._trial.recipe
        else:
            spec = sandbox_spec(self.task_env_config, self.environment_dir)
            self._sandbox = await self._trial.backend.start(spec)
        await self.ensure_dirs(["/logs/agent", "/logs/verifier", "/logs/artifacts"])
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._running.upload(Path(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._running.upload(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._running.download(source_path, target)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            await self._running.download(source_dir, copy)
            shutil.copytree(copy, target_dir, symlinks=True, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Raises SandboxUnavailable, and RuntimeError after `timeout_sec`, as Harbor's own do."""
        self._commands += 1
        marker = f"TRACEGRAD_HARBOR={self.session_id}-{self._commands}"
        environ = {**(self._merge_env(env) or {}), "TRACEGRAD_HARBOR": marker.partition("=")[2]}
        words = shell_words(
            command,
            cwd=cwd or self.task_env_config.workdir,
            user=self._resolve_user(user),
        )
        if self._recipe is not None:
            words = [starter(self._recipe), *words]
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            end = await self._running.run(
                words, environ=environ, timeout_s=timeout_sec, output=output, marker=marker
            )
            said = output.read_text(errors="replace") if output.exists() else ""
        if (emit := self._output_callback()) is not None and said:
            await emit(said, "stdout")
        if end.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        code = 127 if end.exit_code is None else end.exit_code
        return ExecResult(stdout=said, stderr=end.error, return_code=code)

    @property
    def _running(self) -> Sandbox:
        assert self._sandbox is not None, "it has not been started"
        return self._sandbox


def shell_words(command: str, *, cwd: str | None, user: str | int | None) -> list[str]:
    """`command` for bash, where there is one, in `cwd`, as `user`."""
    line = 'exec "$(command -v bash || command -v sh)" -c "$1"'
    if user not in _ROOT:
        line = f'exec {_as_user(str(user))} sh -c {shlex.quote(line)} sh "$1"'
    if cwd is not None:
        line = f"cd {shlex.quote(str(PurePosixPath(cwd)))} || exit 1; {line}"
    return ["/bin/sh", "-c", line, "sh", command]


def _as_user(user: str) -> str:
    """Of util-linux, which is in every Debian and most other images."""
    if user.isdecimal():
        return f"setpriv --reuid={user} --regid={user} --clear-groups"
    return (
        f'setpriv --reuid={shlex.quote(user)} --regid="$(id -g {shlex.quote(user)})" --init-groups'
    )
