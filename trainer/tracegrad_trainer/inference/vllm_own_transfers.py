"""vLLM's own weight-transfer engines as parts of ours: `ipc` takes a push out of GPU memory that
rank 0 has filled (`weight_ipc`), `nccl_m2n` out of the shards of the ranks (`m2n_push`).

Runs inside a vLLM worker (vLLM 0.32). vLLM's open, copy and load; ours is around them for the files
that a push may go back to, and because handles of memory come as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.m2n_engine import (
    M2NWeightTransferEngine,
    M2NWeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

from tracegrad_trainer.inference.ipc_handles import decode_handle

__all__ = ["IpcReceiver", "IpcTrialInfo", "M2NWeightTransferInitInfo", "M2nReceiver"]


@dataclass
class IpcTrialInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A few bytes of each GPU, by its UUID, to be opened; `content`: what they are."""

    ipc_handles: dict[str, dict[str, Any]]
    content: list[int]


class IpcReceiver:
    """Of one worker."""

    def __init__(self, ours: WeightTransferEngine[Any, Any]) -> None:
        self._device = ours.device
        self._vllm = IPCWeightTransferEngine(ours.config, ours.vllm_config, ours.device, ours.model)
        self._vllm.init_transfer_engine(self._vllm.parse_init_info({"packed": True}))

    def try_out(self, trial: IpcTrialInfo) -> None:
        """Raises ValueError: this worker's GPU is not among them, or its memory is another's;
        RuntimeError: CUDA does not open it."""
        [(_, found)] = packed_ipc_consumer(
            ipc_handle=_decoded(trial.ipc_handles),
            names=["trial"],
            shapes=[[len(trial.content)]],
            dtype_names=["uint8"],
            tensor_sizes=[len(trial.content)],
            device_index=self._device.index,
        )
        if found.tolist() != trial.content:
            raise ValueError("memory that was opened by its handle holds something else")

    def receive(self, packed: Mapping[str, Any]) -> None:
        """Loads one bucket, which may be overwritten then. Raises as `try_out`."""
        handles = _decoded(packed["ipc_handles"])
        update = IPCWeightTransferUpdateInfo(**{**packed, "ipc_handles": handles})
        self._vllm.receive_weights(update)

    def release(self) -> None:
        """The memory that is still open: rank 0 has it back."""
        self._vllm.shutdown()


class M2nReceiver:
    """Of one worker, in one communicator."""

    def __init__(
        self, ours: WeightTransferEngine[Any, Any], init_info: M2NWeightTransferInitInfo
    ) -> None:
        """Before an update begins: its plan is made of the parameters that the model computes with.

        Raises ImportError, ValueError: vLLM's own words.
        """
        self._vllm = M2NWeightTransferEngine(ours.config, ours.vllm_config, ours.device, ours.model)
        self._vllm.init_transfer_engine(init_info)

    def receive(self, update: Mapping[str, Any]) -> None:
        self._vllm.receive_weights(self._vllm.parse_update_info(dict(update)))

    def close(self) -> None:
        self._vllm.shutdown()


def _decoded(handles: Mapping[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    return {uuid: tuple(decode_handle(one)) for uuid, one in handles.items()}
