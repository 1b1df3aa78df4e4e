"""A push to an engine that does not see our files: rank 0 broadcasts what is in them.

The files stay what a push writes and goes back to (`weight_files`); this is only how their tensors
reach the engine's workers: `push.transport = "gloo"` over TCP, `"nccl"` from GPU to GPU. Each
engine has a group of its own with rank 0, so that one that ends, hangs or is started again is no
matter for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from threading import Thread
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    PushError,
    ServedWeights,
    VllmControl,
)
from tracegrad_trainer.inference.transfer_group import (
    LOOK_EVERY_S,
    GroupAddress,
    TransferBackend,
    TransferError,
    TransferGroup,
    address_towards,
    all_announced,
    host_store,
)
from tracegrad_trainer.inference.weight_buckets import BucketReader

T = TypeVar("T")
_LAST_WORDS_S = 10.0  # for the engine to say why a broadcast failed


class BroadcastControl(VllmControl):
    """As `VllmControl`, but an update carries the weights."""

    sees_files = False

    def __init__(
        self, url: str, timeout_s: float, *, backend: TransferBackend, device: torch.device
    ) -> None:
        """`device`: what this process sends from with nccl, a GPU."""
        super().__init__(url, timeout_s)
        self._url = url
        self._timeout_s = timeout_s
        self._backend: TransferBackend = backend
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._group: TransferGroup | None = None
        self._store: TCPStore | None = None  # here alone, while a group is made: see `_leave`
        self._version: str | None = None  # the engine's own word for its weights, as we left it
        self._numbers = count()

    def connect(self) -> None:
        """Makes the group; anew where the engine was started again, or an update has failed."""
        if self._group is not None and self.weight_version() == self._version:
            return
        self._leave()
        try:
            size = 1 + self.world_size()
            host = address_towards(self._url)
            self._store, port = host_store(host)
            address = GroupAddress(host, port, size, self._backend, self._timeout_s)
            with self._asking(lambda: self.join_group(asdict(address))) as answer:
                _wait(lambda: self._all_joined(size), answer)
                self._group = self._met(address, answer)
        except EngineLostError:
            raise
        except (OSError, RuntimeError) as error:  # torch's, TransferError and PushError
            raise PushError(
                f"push.transport = {self._backend!r}: vLLM at {self._url} joins no group: {error};"
                " is its tracegrad this version? push.transport = 'files' needs none"
            ) from error
        self._version = self.weight_version()

    def load(self, served: ServedWeights) -> None:
        self.connect()
        try:
            super().load(served)
        except BaseException:
            self._leave()
            raise
        self._version = str(served.version)

    def close(self) -> None:
        self._leave()
        super().close()

    def _send(self, served: ServedWeights) -> None:
        assert self._group is not None, "connected"
        group, step = self._group, f"update-{next(self._numbers)}"
        try:
            with BucketReader(served.paths) as files:
                update = {"group": group.name, "step": step, "buckets": files.buckets}
                with self._asking(lambda: self._update(update)) as answer:
                    _wait(lambda: group.all_announced(step), answer)
                    for flat in files.read(pinned=self._device.type == "cuda"):
                        group.broadcast(flat.to(self._device), lambda: _check(answer))
        except (OSError, ValueError, SafetensorError, TransferError) as error:
            raise PushError(f"the broadcast to vLLM at {self._url} failed: {error}") from error

    def _met(self, address: GroupAddress, answer: Future[None]) -> TransferGroup:
        """NCCL connects with a first broadcast, and waits without end for a worker that has ended
        since it joined: in a thread that keeps nobody from going on."""
        met = _in_background(lambda: self._meet(address))
        ends = time.monotonic() + address.timeout_s
        while not met.done():
            _check(answer)
            if time.monotonic() > ends:
                raise TransferError(f"its workers do not meet in {address.timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)
        return met.result()

    def _meet(self, address: GroupAddress) -> TransferGroup:
        assert self._store is not None
        return TransferGroup(self._store, 0, address, self._device)

    @contextmanager
    def _asking(self, ask: Callable[[], None]) -> Iterator[Future[None]]:
        """Asks the engine while the body does its part, and raises what the engine says. If the
        body fails the group is left first, or the engine's workers would wait for it."""
        answer = _in_background(ask)
        try:
            yield answer
        except BaseException:
            self._leave()
            with suppress(FutureTimeoutError):
                answer.result(_LAST_WORDS_S)  # better words than ours, if it has some
            raise
        answer.result()

    def _all_joined(self, size: int) -> bool:
        assert self._store is not None
        return all_announced(self._store, "join", range(1, size))

    def _leave(self) -> None:
        """Workers that wait for us wait no longer: with the last who holds a store it is gone."""
        if self._group is not None:
            self._group.close()
        self._group = self._store = None


def _in_background(work: Callable[[], T]) -> Future[T]:
    """In a thread that keeps nobody waiting: an engine whose process has ended during a call may
    never answer it (seen with vLLM 0.32)."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="broadcast", daemon=True).start()
    return future


def _wait(here: Callable[[], bool], answer: Future[None]) -> None:
    """Until all are `here`; or the engine answers before, which it does if they will not be."""
    while not here():
        if answer.done():
            answer.result()
            if not here():
                raise TransferError("its workers do not take part; is it vLLM with our plugin?")
        time.sleep(LOOK_EVERY_S)


def _check(answer: Future[None]) -> None:
    """Raises TransferError: the engine has refused what it was asked, so that its workers wait no
    longer. One that has done it may answer a moment before we see that it has."""
    if answer.done() and answer.exception() is not None:
        raise TransferError(f"its workers have ended it: {answer.exception()}")
