"""A push from every rank's shards into vLLM's, by vLLM's own `nccl_m2n`: no rank gathers what it
sends.

All ranks and all workers of one server are in one NCCL communicator and take part in each tensor in
the same order, so rank 0, which alone drives a push, orders the others to (`M2nOrder`). NCCL waits
without end for one that does not come: whoever waits longer than `push.timeout_s` ends, and with it
the run. Only the weights that the ranks have go this way: what a push goes back to is broadcast
from rank 0's files (`weight_broadcast`).
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tracegrad_trainer.inference.control_routes import EngineLostError, PushError, ServedWeights
from tracegrad_trainer.inference.transfer_group import address_towards
from tracegrad_trainer.inference.weight_broadcast import BroadcastControl

if TYPE_CHECKING:
    from tracegrad_trainer.inference.m2n_source import LearnerSource

NEEDED = "nccl.m2n"


def m2n_missing() -> str | None:
    """What the ranks' processes lack for it."""
    try:
        if importlib.util.find_spec("vllm") is None:
            return "vLLM, whose transfer it is, beside the ranks"
        if importlib.util.find_spec(NEEDED) is None:
            return "the package nccl-extensions, beside the ranks and in vLLM's environment"
    except ModuleNotFoundError:  # of the package around it
        return "the package nccl-extensions, beside the ranks and in vLLM's environment"
    return None


@dataclass(frozen=True, slots=True)
class M2nOrder:
    """Of rank 0 to the others. With an `address` the communicator is made, anew where there was
    one; without one the weights are sent. `size`: ranks and workers; `workers`: by copies of the
    model and by tensor parallelism."""

    host: str | None = None
    port: int = 0
    size: int = 0
    workers: tuple[int, int] = (1, 1)


@dataclass
class M2nSender:
    """On every rank: its end of the communicator."""

    source: LearnerSource
    device: torch.device
    timeout_s: float
    _engine: Any = field(default=None, init=False)

    def take_part(self, order: M2nOrder, client: Any = None) -> None:
        """As ordered; `client`, of rank 0 alone, carries vLLM's requests.

        Raises:
            EngineLostError: it fails, or takes too long; the others may still be in it.
        """
        work = self._connect if order.host is not None else self._send
        done: Future[None] = Future()

        def run() -> None:
            try:
                if self.device.type == "cuda":  # each thread has one of its own
                    torch.cuda.set_device(self.device)
                work(order, client)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        # NCCL cannot be interrupted: a thread that hangs in it keeps nobody from ending.
        Thread(target=run, name="nccl_m2n", daemon=True).start()
        try:
            done.result(self.timeout_s)
        except FutureTimeoutError as error:
            if done.done() and done.exception() is error:  # the work's own
                raise _lost(error) from error
            raise _lost(f"took longer than push.timeout_s = {self.timeout_s:g}") from error
        except Exception as error:
            raise _lost(error) from error

    def _connect(self, order: M2nOrder, client: Any) -> None:
        from vllm.distributed.weight_transfer.m2n_trainer import (
            M2NTrainerInitInfo,
            M2NTrainerWeightTransferEngine,
        )

        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        info = M2NTrainerInitInfo(
            rank=dist.get_rank(),
            master_address=order.host,
            master_port=order.port,
            world_size=order.size,
            num_trainer_ranks=dist.get_world_size(),
            dst_mesh_dims=order.workers,
        )
        self._engine = M2NTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=self.source
        )

    def _send(self, order: M2nOrder, client: Any) -> None:
        assert self._engine is not None, "connected"
        self._engine.send_weights()


class LiveShards:
    """Rank 0's side: the version that the ranks have, while they follow orders."""

    def __init__(self, sender: M2nSender, order: Callable[[M2nOrder], None]) -> None:
        """`order`: hands it to the other ranks."""
        self._sender, self._order = sender, order
        self.version: int | None = None  # None: the ranks do other things

    def take_part(self, order: M2nOrder, client: Any) -> None:
        self._order(order)
        self._sender.take_part(order, client)


class M2nControl(BroadcastControl):
    """As `BroadcastControl`, but live weights go from shards to shards."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        *,
        device: torch.device,
        live: LiveShards,
        tensor_parallel: int,
    ) -> None:
        super().__init__(url, timeout_s, backend="nccl", device=device)
        self._live = live
        self._tensor_parallel = tensor_parallel
        self._made_for: Any = None  # the group of broadcasts that it was made along with

    def connect(self) -> None:
        super().connect()
        # By a thread that puts weights back in between nobody follows.
        if self._live.version is None or self._made_for is self._group:
            return
        host, workers = address_towards(self._url), self.world_size()
        if workers % self._tensor_parallel:
            raise PushError(
                f"push.transport = 'nccl_m2n': vLLM at {self._url} has {workers} workers, no whole"
                f" number of vllm.tensor_parallel = {self._tensor_parallel}"
            )
        order = M2nOrder(
            host,
            _free_port(host),
            dist.get_world_size() + workers,
            (workers // self._tensor_parallel, self._tensor_parallel),
        )
        self._live.take_part(order, _Client(self))
        self._made_for = self._group

    def _send(self, served: ServedWeights) -> None:
        if self._live.version == served.version:
            self._live.take_part(M2nOrder(), None)
        else:
            super()._send(served)

    def send_names(self, names: list[str]) -> None:
        self._update({"m2n": {"names": names}})


class _Client:
    """What vLLM's trainer side asks of its server. Whoever loads begins and ends the update."""

    def __init__(self, control: M2nControl) -> None:
        self._control = control

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._control.join_group(init_info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._control.send_names(update_info["names"])

    def finish_weight_update(self) -> None:
        pass


def _lost(why: object) -> EngineLostError:
    return EngineLostError(
        f"push.transport = 'nccl_m2n': {why}; ranks and vLLM may wait for each other: restart both"
    )


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
