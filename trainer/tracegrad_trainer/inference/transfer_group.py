"""The group of processes in which weights are broadcast: the trainer's rank 0, and the workers of
one vLLM engine.

It is made of torch's own process group objects and belongs to neither torch's default group of the
ranks nor vLLM's of its workers. Whoever reaches its ports can read the weights and replace them:
they are opened on the one address that the engine is reached from.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from traceback import clear_frames
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tracegrad.urls import unix_socket

TransferBackend = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 0.002
_environment_lock = Lock()
# For a worker to reach the store; meanwhile its engine does nothing else.
_STORE_TIMEOUT = timedelta(seconds=60)
# Workers wait for so much of a request's time: while one waits, for a trainer that is stopped, its
# engine answers nobody, and the next trainer would give it up for lost.
_PATIENCE = 0.9


class TransferError(RuntimeError):
    """A process of the group did not come, has ended, or takes too long."""


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group meets: in the store that rank 0 keeps at `host` and `port`. `size`: processes,
    rank 0 among them; `timeout_s`: for each to come, and for each broadcast."""

    host: str
    port: int
    size: int
    backend: TransferBackend
    timeout_s: float

    @property
    def name(self) -> str:
        """No other group has it."""
        return f"{self.host} {self.port}"


class TransferGroup:
    """One process's end of it. Closed by `close`, after which the others' broadcasts fail."""

    def __init__(
        self, store: TCPStore, rank: int, address: GroupAddress, device: torch.device
    ) -> None:
        """Waits for the others. `device`: of the tensors that are broadcast; with nccl a GPU that
        no other process of the group has.

        Raises:
            TransferError: they do not come.
        """
        self.store = store
        self.device = device
        self.name = address.name
        self._backend = address.backend
        self._timeout_s = address.timeout_s
        self._group: Any = None
        self._others = range(1, address.size)
        host = _own_address(address.host, address.port) if rank else address.host
        timeout = timedelta(seconds=address.timeout_s * (_PATIENCE if rank else 1))
        try:
            self._group = _process_group(store, rank, address, host, timeout)
            # NCCL connects with the first of them.
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
        except RuntimeError as error:
            # The others wait for as long as the store is there, and the error's frames hold it.
            clear_frames(error.__traceback__)
            self.close()
            del self.store, store
            raise TransferError(_one_line(error)) from error

    def broadcast(self, tensor: Tensor, look: Callable[[], None] | None = None) -> None:
        """Rank 0's, in place, to all. `look` is called while it waits, and may raise: NCCL does not
        notice that a peer has ended. Raises TransferError."""
        if self._group is None:
            raise TransferError("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        ends = time.monotonic() + self._timeout_s
        try:
            with on_device(self.device):
                work = self._group.broadcast([tensor], options)
                try:
                    while look is not None and not work.is_completed() and time.monotonic() < ends:
                        look()
                        time.sleep(LOOK_EVERY_S)
                    work.wait()
                finally:
                    del work  # an error's frames would hold the connections that others wait on
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(_one_line(error)) from error

    def announce(self, step: str, rank: int, group: str) -> None:
        """Of a worker: it takes part from now on in what rank 0 broadcasts in the `group` of this
        name. Raises TransferError: that is another one."""
        if group != self.name:
            raise TransferError(
                "this worker is in another group: does another trainer push to this engine, too?"
            )
        _announce(self.store, step, rank)

    def all_announced(self, step: str) -> bool:
        """On rank 0. Raises TransferError."""
        return all_announced(self.store, step, self._others)

    def close(self) -> None:
        if self._group is not None and self._backend == "nccl":
            self._group.abort()  # else its end waits for peers, which may be gone
        self._group = None  # its connections are closed with it


def host_store(host: str) -> tuple[TCPStore, int]:
    """Rank 0's, and its port. torch's own would listen on all addresses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_group(address: GroupAddress, rank: int, device: torch.device) -> TransferGroup:
    """A worker's way into it. Raises TransferError."""
    timeout = min(_STORE_TIMEOUT, timedelta(seconds=address.timeout_s))
    try:
        store = TCPStore(address.host, address.port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise TransferError(
            f"{address.host}:{address.port} is not reached from the engine: {_one_line(error)}"
        ) from error
    _announce(store, "join", rank)
    return TransferGroup(store, rank, address, device)


def all_announced(store: TCPStore, step: str, ranks: range) -> bool:
    try:
        return bool(store.check([_key(step, rank) for rank in ranks]))
    except RuntimeError as error:
        raise TransferError(_one_line(error)) from error


def address_towards(url: str) -> str:
    """This machine's, as the server at `url` reaches it."""
    if unix_socket(url) is not None:
        return LOOPBACK
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    return _own_address(parts.hostname, parts.port or 80)


def _own_address(host: str, port: int) -> str:
    """From which packets to `host` leave; none is sent. Raises OSError."""
    unreachable: OSError | None = None
    # A name may have addresses of a family that this machine does not speak (localhost, ::1).
    for family, kind, *_, peer in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(peer)
                return str(probe.getsockname()[0])
        except OSError as error:
            unreachable = error
    raise unreachable or OSError(f"{host} has no address")


def _announce(store: TCPStore, step: str, rank: int) -> None:
    try:
        store.set(_key(step, rank), "here")
    except RuntimeError as error:
        raise TransferError(_one_line(error)) from error


def _key(step: str, rank: int) -> str:
    return f"{step}/{rank}"


def _process_group(
    store: TCPStore, rank: int, address: GroupAddress, host: str, timeout: timedelta
) -> dist.ProcessGroupNCCL | dist.ProcessGroupGloo:
    if address.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _nccl_raises():
            return dist.ProcessGroupNCCL(store, rank, address.size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, address.size, options)


@contextmanager
def _nccl_raises() -> Iterator[None]:
    """A group that is made meanwhile waits for its collectives and raises after its time; by
    default torch ends the process. Read from torch 2.13's documentation of ProcessGroupNCCL. One
    thread at a time: the environment is the process's, and engines' groups are made side by side.
    """
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with _environment_lock:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


def _one_line(error: Exception) -> str:
    """gloo's first sentence, without the place in its source."""
    text = re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", str(error).strip())
    return re.split(r"\n|\. ", text, maxsplit=1)[0][:300]
