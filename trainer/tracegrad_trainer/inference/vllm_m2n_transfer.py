"""vLLM's own weight-transfer engine `nccl_m2n` as a part of ours: it takes a push out of the shards
of the ranks (`m2n_push`).

Runs inside a vLLM worker (vLLM 0.32). Ours is around it for what a push may go back to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.m2n_engine import (
    M2NWeightTransferEngine,
    M2NWeightTransferInitInfo,
)

__all__ = ["M2NWeightTransferInitInfo", "M2nReceiver"]


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
