"""A `SleepingEngine` whose workers are vLLM's own `ipc`, as ours has it within. What would be GPUs
is the host's memory: handles are kept in a table in place of CUDA's."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from support.trainer.sleeping_engine import Refused, SleepingEngine
from tracegrad_trainer.inference import weight_ipc
from tracegrad_trainer.inference.ipc_handles import RebuildArguments
from tracegrad_trainer.inference.vllm_own_transfers import IpcReceiver, IpcTrialInfo
from tracegrad_trainer.inference.vllm_weight_transfer import (
    SafetensorsUpdateInfo,
    SafetensorsWeightTransferEngine,
)

REBUILD = inspect.signature(reductions.rebuild_cuda_tensor)


class HostGpus:
    """So many; `opened`: handles that a worker has open."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.devices = [torch.device("cpu", i) for i in range(count)]
        self.memory: dict[bytes, Tensor] = {}
        self.opened: list[bytes] = []
        patch.setattr(weight_ipc, "exported", self.export)
        patch.setattr(weight_ipc, "uuid_of", lambda device: f"GPU-{device.index}")
        patch.setattr(reductions, "rebuild_cuda_tensor", self.open)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}")
        )

    def export(self, buffer: Tensor) -> tuple[Any, ...]:
        handle = f"handle {len(self.memory)}".encode()
        self.memory[handle] = buffer
        return RebuildArguments(
            tensor_cls=torch.Tensor,
            tensor_size=buffer.size(),
            tensor_stride=buffer.stride(),
            tensor_offset=0,
            storage_cls=torch.storage.TypedStorage,
            dtype=buffer.dtype,
            storage_device=77,
            storage_handle=handle,
            storage_size_bytes=buffer.numel(),
            storage_offset_bytes=512,
            requires_grad=False,
            ref_counter_handle=b"\x00\xff counter",
            ref_counter_offset=3,
            event_handle=b"event",
            event_sync_required=True,
        )

    def open(self, *arguments: Any) -> Tensor:
        given = REBUILD.bind(*arguments).arguments
        assert list(given) == list(RebuildArguments._fields)
        buffer = self.memory[given["storage_handle"]]
        assert given["tensor_size"] == buffer.size()
        assert given["storage_device"] in range(len(self.devices)), "the worker's own"
        self.opened.append(given["storage_handle"])
        return buffer


class Worker:
    """A model that takes what it is given; its engine parses what comes over the wire."""

    def __init__(self, index: int | None) -> None:
        self.loaded: dict[str, Tensor] = {}
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        device = SimpleNamespace(type="cuda", index=index)
        self.engine = SafetensorsWeightTransferEngine(None, config, device, self)
        self.receiver = IpcReceiver(self.engine)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.loaded |= dict(weights)


class IpcEngine(SleepingEngine):
    """`gpus`: of which its workers are, one each."""

    def __init__(self, gpus: list[int]) -> None:
        super().__init__()
        self.workers = [Worker(index) for index in gpus]
        self.updates: list[SafetensorsUpdateInfo] = []
        self.files = 0

    def init_weight_transfer_engine(self, query: dict[str, str], body: dict[str, Any]) -> None:
        for worker in self.workers:
            info = worker.engine.parse_init_info(body["init_info"])
            assert isinstance(info, IpcTrialInfo)
            self._refusing(lambda w=worker, i=info: w.receiver.try_out(i))

    def update_weights(self, query: dict[str, str], body: dict[str, Any]) -> None:
        update = self.workers[0].engine.parse_update_info(body["update_info"])
        self.updates.append(update)
        if update.packed is None:
            self.files += bool(update.paths)  # one of nothing ends an update that is open
            super().update_weights(query, body)
            return
        for worker in self.workers:
            self._refusing(lambda w=worker: w.receiver.receive(update.packed))
        if update.last:
            self.state.incoming = [self.workers[0].loaded["w"].item()]
            for worker in self.workers:
                worker.receiver.release()

    def _refusing(self, work: Any) -> None:
        try:
            work()
        except (ValueError, RuntimeError, KeyError) as error:
            self.state.updating = False
            raise Refused(str(error)) from error
