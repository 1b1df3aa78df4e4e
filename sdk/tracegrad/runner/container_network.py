"""What a container reaches: the proxy, a package mirror where one is given, and nothing else.

As root, or as the user whose engine it is (rootless), beside the engine: the container has a
loopback interface and no other one. A socket that listens there is made from here, by a thread or a
process that enters the container's network namespace: where a socket is made it stays, and the loop
serves it like any other one. There is no route, no bridge and no packet filter to get wrong.

Else: a network without a way out, and the runner listens at its gateway. That is weaker: the host's
own services that listen at all addresses are reached through the gateway, containers of one run
reach each other, and the engine has to filter (`--iptables`, its default).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from docker.errors import APIError

from tracegrad.runner.docker_engine import DockerEngine, explanation
from tracegrad.runner.proxy_relay import Relay, RelayTarget
from tracegrad.runner.sandbox import SandboxUnavailable

_CLONE_NEWNET = 0x40000000
_BACKLOG = 128
_INSIDE = "127.0.0.1"


class Addresses:
    """The relays of one sandbox, and where it finds them."""

    def __init__(self, relays: Sequence[tuple[Relay, str]], *, shared: bool) -> None:
        self._relays, self._shared = relays, shared

    def reachable(self, url: str) -> str:
        """Raises ValueError: it leads elsewhere than they do."""
        for relay, address in self._relays:
            if relay.target.serves(url):
                rest = url.split("//", 1)[1].partition("/")
                return f"http://{address}{rest[1]}{rest[2]}"
        raise ValueError(f"{url} cannot be reached from a sandbox: only the proxy and a mirror can")

    async def close(self) -> None:
        if not self._shared:
            for relay, _ in self._relays:
                await relay.close()


class ContainerNetwork(Protocol):
    async def mode(self) -> str:
        """What a container is made with (`NetworkMode`). Raises SandboxUnavailable."""
        ...

    async def open(self, container: Mapping[str, Any], targets: Sequence[RelayTarget]) -> Addresses:
        """Of one that runs, as the engine tells of it. Raises SandboxUnavailable."""
        ...

    async def close(self) -> None: ...


def has_own_cgroup(container: Mapping[str, Any]) -> bool:
    """Whether its processes here are those of a control group with its id; a rootless engine may
    have none."""
    return _names_container(container, "cgroup")


def is_beside_engine(container: Mapping[str, Any]) -> bool:
    """Whether the engine's process numbers are this machine's: DOCKER_HOST may lead to another
    one, or out of this PID namespace. Its files (`/etc/hosts`) are mounted from a folder of its
    id."""
    return has_own_cgroup(container) or _names_container(container, "mountinfo")


def _names_container(container: Mapping[str, Any], file: str) -> bool:
    with suppress(OSError):
        said = Path(f"/proc/{container['State']['Pid']}/{file}").read_text()
        return str(container["Id"]) in said
    return False


class NamespaceNetwork:
    """Listens on the container's own loopback interface."""

    async def mode(self) -> str:
        return "none"

    async def open(self, container: Mapping[str, Any], targets: Sequence[RelayTarget]) -> Addresses:
        ports: list[int] = []
        for target in targets:
            port = target.port
            while port in ports:
                port = port + 1 if port < 65535 else 1024
            ports.append(port)
        try:
            if not is_beside_engine(container):
                raise OSError("it is no process of this machine")
            listen = _listen_in_namespace if os.geteuid() == 0 else _listen_as_owner
            sockets = await asyncio.to_thread(listen, int(container["State"]["Pid"]), ports)
        except OSError as error:
            raise SandboxUnavailable(
                f"the container's network could not be entered: {error}; run beside the engine,"
                " as root or as its user, or with network = internal"
            ) from None
        relays = []
        for target, port, listening in zip(targets, ports, sockets, strict=True):
            relay = Relay(target)
            await relay.serve(listening)
            relays.append((relay, f"{_INSIDE}:{port}"))
        return Addresses(relays, shared=False)

    async def close(self) -> None:
        pass


def _listen_in_namespace(pid: int, ports: Sequence[int]) -> list[socket.socket]:
    """Sockets that listen on the loopback interface of the process's network. Raises OSError."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def inside() -> None:
        try:
            with ExitStack() as unfinished:
                fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                unfinished.callback(os.close, fd)
                if _libc.setns(fd, _CLONE_NEWNET) != 0:
                    raise OSError(number := ctypes.get_errno(), os.strerror(number))
                with ExitStack() as sockets:
                    for port in ports:
                        one = sockets.enter_context(socket.socket())
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        one.bind((_INSIDE, port))
                        one.listen(_BACKLOG)
                        one.setblocking(False)
                        made.append(one)
                    sockets.pop_all()
        except OSError as error:
            failed.append(error)

    # A thread of its own, which ends: one of a pool would stay in the other network.
    thread = threading.Thread(target=inside, name="tracegrad-netns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made


_libc = ctypes.CDLL(None, use_errno=True)

# Only a process with one thread may enter a user namespace; its sockets are sent back.
_ENTER_AND_LISTEN = """
import ctypes, os, socket, sys
pid, back, backlog, *ports = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
for namespace in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "net")]:
    if libc.setns(namespace, 0) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
made = [socket.create_server(("127.0.0.1", port), backlog=backlog) for port in ports]
socket.send_fds(socket.socket(fileno=back), [b"."], [each.fileno() for each in made])
"""
_ENTER_S = 60.0


def _listen_as_owner(pid: int, ports: Sequence[int]) -> list[socket.socket]:
    """As `_listen_in_namespace`, of a container of this user's own engine. Raises OSError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        numbers = [str(number) for number in (pid, theirs.fileno(), _BACKLOG, *ports)]
        try:
            subprocess.run(
                [sys.executable, "-ISc", _ENTER_AND_LISTEN, *numbers],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_ENTER_S,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise OSError("".join(said) or f"exit code {error.returncode}") from None
        except subprocess.TimeoutExpired:
            raise OSError(f"that took more than {_ENTER_S:.0f} s") from None
        _, received, _, _ = socket.recv_fds(ours, 1, len(ports))
    made = [socket.socket(fileno=each) for each in received]
    for each in made:
        each.setblocking(False)
    return made


class InternalNetwork:
    """A network of the engine's without a way out, for all containers of a run."""

    def __init__(self, engine: DockerEngine, name: str, labels: Mapping[str, str]) -> None:
        self._engine, self._name, self._labels = engine, name, labels
        self._gateway: str | None = None
        self._making = asyncio.Lock()
        self._relays: dict[RelayTarget, tuple[Relay, str]] = {}

    async def mode(self) -> str:
        async with self._making:
            if self._gateway is None:
                self._gateway = await self._make()
        return self._name

    async def _make(self) -> str:
        api = self._engine.api
        try:
            await self._engine.call(
                api.create_network,
                self._name,
                driver="bridge",
                internal=True,
                labels=dict(self._labels),
            )
            made = await self._engine.call(api.inspect_network, self._name)
        except APIError as error:
            raise SandboxUnavailable(
                f"no network for the sandboxes: {explanation(error)}"
            ) from None
        return str(made["IPAM"]["Config"][0]["Gateway"])

    async def open(self, container: Mapping[str, Any], targets: Sequence[RelayTarget]) -> Addresses:
        async with self._making:
            for target in targets:
                if target not in self._relays:
                    self._relays[target] = await self._listen(target)
        return Addresses([self._relays[target] for target in targets], shared=True)

    async def _listen(self, target: RelayTarget) -> tuple[Relay, str]:
        assert self._gateway is not None, "a container is made before"
        listening = socket.socket()
        try:
            listening.bind((self._gateway, 0))
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            raise SandboxUnavailable(
                f"nothing can listen at the sandboxes' gateway {self._gateway}: {error.strerror};"
                " the engine must run on this machine, not in a virtual one"
            ) from None
        listening.setblocking(False)
        relay = Relay(target)
        await relay.serve(listening)
        return relay, f"{self._gateway}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        for relay, _ in self._relays.values():
            await relay.close()
        if self._gateway is not None:
            with suppress(APIError):
                await self._engine.call(self._engine.api.remove_network, self._name)
