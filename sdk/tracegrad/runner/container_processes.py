"""Ending all that runs in a container but its first process, whatever it does against that."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from docker.errors import APIError

from tracegrad.runner.container_network import has_own_cgroup, is_beside_engine
from tracegrad.runner.docker_engine import DockerEngine, explanation
from tracegrad.runner.sandbox import SandboxUnavailable

_ROUNDS = 5  # of killing what is there, before the container is frozen for it
_SETTLE_S = 0.02  # between two looks: the killed ones end meanwhile
_SETTLES = 1500
_REAPS = 500  # a first process without GNU's `env` reaps once a second


class ContainerProcesses(Protocol):
    async def terminate(self) -> None:
        """SIGTERM to all of them."""
        ...

    async def end(self) -> None:
        """Until none is left, and there is room for others: zombies count for the bound of
        processes until they are reaped. Raises SandboxUnavailable: some are left, and the container
        is killed."""
        ...


def processes_of(engine: DockerEngine, container: Mapping[str, Any]) -> ContainerProcesses:
    name, bound = str(container["Id"]), bound_of(container)
    if not (is_beside_engine(container) and (os.geteuid() == 0 or engine.is_own)):
        return InsideProcesses(engine, name, bound)
    first = int(container["State"]["Pid"])
    if has_own_cgroup(container):
        return HostProcesses(engine, name, first, bound, lambda pid: _is_in_cgroup(pid, name))
    namespace = _pid_namespace(first)
    return HostProcesses(
        engine, name, first, bound, lambda pid: _pid_namespace(pid) == namespace is not None
    )


def _is_in_cgroup(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/cgroup").read_text()


def _pid_namespace(pid: int) -> str | None:
    """None: of somebody else's process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except PermissionError:
        return None


def bound_of(container: Mapping[str, Any]) -> int | None:
    """How many processes it may have, zombies included."""
    bound = container["HostConfig"].get("PidsLimit")
    return bound if bound and bound > 0 else None


class HostProcesses:
    """They are this machine's own: nothing inside is asked, so nothing inside (no bound of
    processes, no shell of the agent's) stands against it. `belongs`: whether one is the
    container's: by its control group, or, where it has none, by its PID namespace. Raises
    OSError."""

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        first: int,
        bound: int | None,
        belongs: Callable[[int], bool],
    ) -> None:
        self._engine, self._container, self._first = engine, container, first
        self._bound, self._belongs = bound, belongs

    async def terminate(self) -> None:
        await asyncio.to_thread(self._signal, signal.SIGTERM)

    async def end(self) -> None:
        await self._kill_all()
        await _until_reaped(self._zombies, self._bound)

    async def _kill_all(self) -> None:
        for _ in range(_ROUNDS):
            if not await asyncio.to_thread(self._signal, signal.SIGKILL):
                return
            await asyncio.sleep(_SETTLE_S)
        # They fork faster than they are found, or are slow to die. Frozen, none can fork.
        await self._freeze_and_kill()
        for _ in range(_SETTLES):
            if not await asyncio.to_thread(self._signal, signal.SIGKILL):
                return
            await asyncio.sleep(_SETTLE_S)
        await kill_container(self._engine, self._container)

    async def _freeze_and_kill(self) -> None:
        with suppress(APIError):
            await self._engine.call(self._engine.api.pause, self._container)
        try:
            await asyncio.to_thread(self._signal, signal.SIGKILL)
        finally:
            with suppress(APIError):
                await self._engine.call(self._engine.api.unpause, self._container)

    def _signal(self, number: int) -> int:
        """To each of them; how many there are."""
        sent = 0
        for pid in self._pids():
            with suppress(OSError):
                # Held while it is looked at: its number may be another one's by now.
                held = os.pidfd_open(pid)
                try:
                    if self._is_inside(pid):
                        signal.pidfd_send_signal(held, number)
                        sent += 1
                finally:
                    os.close(held)
        return sent

    async def _zombies(self) -> int:
        return await asyncio.to_thread(lambda: sum(1 for _ in self._pids(zombies=True)))

    def _pids(self, *, zombies: bool = False) -> Iterator[int]:
        for entry in os.listdir("/proc"):
            pid = int(entry) if entry.isdecimal() else self._first
            if pid != self._first and self._is_inside(pid, zombie=zombies):
                yield pid

    def _is_inside(self, pid: int, *, zombie: bool = False) -> bool:
        try:
            # A zombie is in its group until it is waited for, which the first process may never do.
            return self._belongs(pid) and _is_zombie(pid) == zombie
        except OSError:
            return False


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


class InsideProcesses:
    """By a shell inside: kill(-1) reaches all but itself and the first process."""

    def __init__(self, engine: DockerEngine, container: str, bound: int | None) -> None:
        self._engine, self._container, self._bound = engine, container, bound

    async def terminate(self) -> None:
        await self._kill_all("TERM")

    async def end(self) -> None:
        for _ in range(_ROUNDS):
            if not await self._others():
                break
            await self._kill_all("KILL")
            await asyncio.sleep(_SETTLE_S)
        else:
            if await self._others():
                await kill_container(self._engine, self._container)
        await _until_reaped(self._zombies, self._bound)

    async def _others(self) -> bool:
        """Whether any is left; zombies are none."""
        try:
            return sum(not state.startswith("Z") for state in await self._states()) > 1
        except APIError:
            return True

    async def _zombies(self) -> int:
        with suppress(APIError):
            return sum(state.startswith("Z") for state in await self._states())
        return 0

    async def _states(self) -> list[str]:
        found = await self._engine.call(
            self._engine.api.top, self._container, ps_args="-eo pid,stat"
        )
        # Podman does not divide a row.
        return [" ".join(row).split()[1] for row in found["Processes"]]

    async def _kill_all(self, name: str) -> None:
        api = self._engine.api
        with suppress(APIError):
            made = await self._engine.call(
                api.exec_create, self._container, ["/bin/sh", "-c", f"kill -{name} -1"], user="0"
            )
            await self._engine.call(api.exec_start, made["Id"])


async def _until_reaped(zombies: Callable[[], Awaitable[int]], bound: int | None) -> None:
    """Until they leave room for the next command, or the first process does not reap at all."""
    for _ in range(_REAPS):
        if bound is None or 2 * await zombies() < bound:
            return
        await asyncio.sleep(_SETTLE_S)


async def kill_container(engine: DockerEngine, container: str) -> None:
    """Raises SandboxUnavailable, always."""
    said = "processes in the container could not be ended, and it was killed"
    try:
        await engine.call(engine.api.kill, container)
    except APIError as error:
        said = f"processes in the container could not be ended: {explanation(error)}"
    raise SandboxUnavailable(said)
