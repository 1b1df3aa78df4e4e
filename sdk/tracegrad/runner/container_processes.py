"""Ending all that runs in a container but its first process, whatever it does against that."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from docker.errors import APIError

from tracegrad.runner.container_network import is_beside_engine
from tracegrad.runner.docker_engine import DockerEngine, explanation
from tracegrad.runner.sandbox import SandboxUnavailable

_ROUNDS = 5  # of killing what is there, before the container is frozen for it
_SETTLE_S = 0.02  # between two looks: the killed ones end meanwhile
_SETTLES = 1500


class ContainerProcesses(Protocol):
    async def terminate(self) -> None:
        """SIGTERM to all of them."""
        ...

    async def end(self) -> None:
        """Until none is left. Raises SandboxUnavailable: some are, and the container is killed."""
        ...


def processes_of(engine: DockerEngine, container: Mapping[str, Any]) -> ContainerProcesses:
    if os.geteuid() == 0 and is_beside_engine(container):
        return HostProcesses(engine, str(container["Id"]), int(container["State"]["Pid"]))
    return InsideProcesses(engine, str(container["Id"]))


class HostProcesses:
    """They are this machine's own, and are found by their control group: nothing inside is asked,
    so nothing inside (no bound of processes, no shell of the agent's) stands against it."""

    def __init__(self, engine: DockerEngine, container: str, first: int) -> None:
        self._engine, self._container, self._first = engine, container, first

    async def terminate(self) -> None:
        await asyncio.to_thread(self._signal, signal.SIGTERM)

    async def end(self) -> None:
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

    def _pids(self) -> Iterator[int]:
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and int(entry) != self._first and self._is_inside(int(entry)):
                yield int(entry)

    def _is_inside(self, pid: int) -> bool:
        try:
            # A zombie is in its group until it is waited for, which the first process may never do.
            inside = self._container in Path(f"/proc/{pid}/cgroup").read_text()
            return inside and not _is_zombie(pid)
        except OSError:
            return False


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


class InsideProcesses:
    """By a shell inside: kill(-1) reaches all but itself and the first process."""

    def __init__(self, engine: DockerEngine, container: str) -> None:
        self._engine, self._container = engine, container

    async def terminate(self) -> None:
        await self._kill_all("TERM")

    async def end(self) -> None:
        for _ in range(_ROUNDS):
            if not await self._others():
                return
            await self._kill_all("KILL")
            await asyncio.sleep(_SETTLE_S)
        if await self._others():
            await kill_container(self._engine, self._container)

    async def _others(self) -> bool:
        """Whether any is left; zombies are none."""
        try:
            found = await self._engine.call(
                self._engine.api.top, self._container, ps_args="-eo pid,stat"
            )
        except APIError:
            return True
        state = found["Titles"].index("STAT")
        return sum(not row[state].startswith("Z") for row in found["Processes"]) > 1

    async def _kill_all(self, name: str) -> None:
        api = self._engine.api
        with suppress(APIError):
            made = await self._engine.call(
                api.exec_create, self._container, ["/bin/sh", "-c", f"kill -{name} -1"], user="0"
            )
            await self._engine.call(api.exec_start, made["Id"])


async def kill_container(engine: DockerEngine, container: str) -> None:
    """Raises SandboxUnavailable, always."""
    said = "processes in the container could not be ended, and it was killed"
    try:
        await engine.call(engine.api.kill, container)
    except APIError as error:
        said = f"processes in the container could not be ended: {explanation(error)}"
    raise SandboxUnavailable(said)
