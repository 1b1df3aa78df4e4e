"""A Ray cluster as far as a run needs one: joined, with a proxy that its hosts reach, and room."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from tracegrad.runner.sandbox import SandboxUnavailable

_CONNECT_S = 10.0
_joined: set[RayCluster] = set()  # they share the connection that the first of them made
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RayCluster:
    """Of one run.

    Args:
        address: host:port, or auto. This machine is one of its hosts.
        option, resources_option: what a user gave these by, for errors.
    """

    def __init__(
        self, address: str, *, option: str = "--ray", resources_option: str = "--ray-resource"
    ) -> None:
        self._address, self._option, self._resources_option = address, option, resources_option
        self._ray: Any = None

    @property
    def ray(self) -> Any:
        """The package."""
        assert self._ray is not None, "join comes first"
        return self._ray

    def join(self, proxy: str) -> None:
        """`proxy`: its URL: what the hosts reach.

        Raises ValueError: no Ray, no cluster, or a proxy that the hosts do not reach.
        """
        self._ray, made = _connected(self._address, self._option)
        if made or _joined:
            _joined.add(self)
        _check_proxy(proxy, [node["NodeManagerAddress"] for node in self._nodes()])

    def room(self, demand: Mapping[str, float]) -> int:
        """How many that want so much run at once. Raises ValueError: no host can hold one."""
        found = sum(_room(node["Resources"], demand) for node in self._nodes())
        if found == 0:
            wanted = amounts(demand)
            raise ValueError(f"{self._resources_option}: no host of the cluster has {wanted}")
        return found

    def leave(self) -> None:
        """With the last run of this process that is there: all that runs for it ends. Where
        somebody else joined, that one leaves, too."""
        if self in _joined:
            _joined.remove(self)
            if not _joined:
                self._ray.shutdown()

    @contextmanager
    def translated(self, host: str | None) -> Iterator[None]:
        """What the other side raised, as it raised it; what Ray says of hosts and workers, as
        SandboxUnavailable. `host`: where it runs; None: nowhere yet."""
        errors = self.ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, Exception):
                raise SandboxUnavailable(f"ray: {_in_one_line(error)}") from None
            raise cause from None
        except errors.RayError as error:
            where = "ray" if host is None else f"host {host} is lost"
            raise SandboxUnavailable(f"{where}: {_in_one_line(error)}") from None

    def _nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]


def with_default_cpu(resources: Mapping[str, float]) -> dict[str, float]:
    """Ray's own of a worker is one CPU for its placement, and none while it runs."""
    demand = {"CPU": 1.0, **resources}
    return {name: amount for name, amount in demand.items() if amount or name == "CPU"}


def placement(demand: Mapping[str, float]) -> dict[str, Any]:
    """As the options of a remote function or class."""
    rest = dict(demand)
    return {
        "num_cpus": rest.pop("CPU"),
        "num_gpus": rest.pop("GPU", 0),
        "memory": rest.pop("memory", None),
        "resources": rest,
    }


def amounts(demand: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in demand.items())


def check_ray(option: str = "--ray") -> None:
    """Raises ValueError."""
    if find_spec("ray") is None:
        raise ValueError(f"{option} needs the ray package: pip install 'tracegrad[ray]'")


def _in_one_line(error: Exception) -> str:
    """The first one says what, the last one why: between them is a traceback of the other side."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " … ".join(dict.fromkeys(each[:300] for each in (*lines[:1], *lines[-1:])))
    return f"{type(error).__name__}: {said or 'no more is known'}"


def _connected(address: str, option: str) -> tuple[Any, bool]:
    """The package, and whether this process has joined the cluster just now. Raises ValueError:
    nobody is there."""
    check_ray(option)
    if address.startswith("ray://"):
        raise ValueError(
            f"{option} {address}: run on a host of the cluster, and give auto or host:port"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return ray, False
    _check_listening(address, option)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"{option} {address}: {_in_one_line(error)}") from None
    return ray, True


def _check_listening(address: str, option: str) -> None:
    """Ray itself tries for minutes. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{option} {address}: nobody is there: {error}") from None


def _check_proxy(proxy: str, addresses: Sequence[str]) -> None:
    """Raises ValueError."""
    host = urlsplit(proxy).hostname or ""
    here = {*_LOOPBACK, *_own_addresses()}
    elsewhere = [each for each in addresses if each not in here]
    if host in _LOOPBACK and elsewhere:
        raise ValueError(
            f"TRACEGRAD_URL: {proxy} is this machine alone, and {elsewhere[0]} is not; serve the"
            " proxy on an address that the hosts reach (--host, with an admin key), and name that"
        )


def _own_addresses() -> set[str]:
    import ray

    found = {ray.util.get_node_ip_address()}
    with suppress(OSError):
        found |= {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    return found


def _room(has: Mapping[str, float], demand: Mapping[str, float]) -> int:
    rooms = [int(has.get(name, 0.0) / amount) for name, amount in demand.items() if amount]
    return min(rooms, default=1)
