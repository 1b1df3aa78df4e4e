"""vLLM's weight-transfer engine `tracegrad_adapter`: LoRA adapters arrive as peft folders.

Runs inside a vLLM worker (vLLM 0.32). vLLM's own route for this, /v1/load_lora_adapter, does not
fit a policy that changes under running requests: with `load_inplace` each of them carries the path
that it began with and loads it again at every forward pass, without it they keep the old adapter.
Here all requests name the adapter that vLLM was started with (--lora-modules), whose path is a
link. vLLM forgets its adapters at the end of a weight update, and loads them again from their path
for the next forward pass: by then the link leads to the new one. The push clears the prefix cache,
as one of whole weights does.

A second name (`VllmSettings.candidates`) has a link of its own. A push of a candidate turns that
one alone. Every other push turns both: calls that were given the second name while there was a
candidate may still run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from tracegrad_trainer.config.vllm import ADAPTER_VARIABLE, candidate_link
from tracegrad_trainer.inference.zero_adapter import keep_adapter

# The numbers that vLLM's server gives the adapters of --lora-modules, in their order.
ADAPTER_NUMBER, CANDIDATE_NUMBER = 1, 2


@dataclass
class AdapterInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: an update names its file."""


@dataclass
class AdapterUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`paths`: one adapter_model.safetensors with its adapter_config.json beside it."""

    paths: list[str]
    candidate: bool = False


class AdapterTransferEngine(
    WeightTransferEngine[AdapterInitInfo, AdapterUpdateInfo]  # type: ignore[misc]
):
    init_info_cls = AdapterInitInfo
    update_info_cls = AdapterUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: AdapterInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: AdapterUpdateInfo) -> None:
        """Whether vLLM can load it. If not, the former one stays.

        Raises:
            ValueError: not one file is named, vLLM cannot serve what it holds, or it was started
                without a name for candidates.
        """
        if len(update_info.paths) != 1:
            raise ValueError(f"paths: an adapter is one file, not {len(update_info.paths)}")
        folder = Path(update_info.paths[0]).parent
        has_second = self.vllm_config.lora_config.max_loras > 1
        if update_info.candidate and not has_second:
            raise ValueError("candidate: vLLM was started with room for one adapter (--max-loras)")
        link = Path(os.environ[ADAPTER_VARIABLE])
        links = ([] if update_info.candidate else [link]) + [candidate_link(link)] * has_second
        self._folder, self._links = folder, links
        number = CANDIDATE_NUMBER if update_info.candidate else ADAPTER_NUMBER
        # The runner's own manager of adapters is out of reach; one more over the same slots.
        loader = LRUCacheWorkerLoRAManager(
            self.vllm_config, self.device, self.model.embedding_modules
        )
        loader._adapter_manager = self.model.lora_manager
        loader.add_adapter(LoRARequest(str(folder), number, str(folder), load_inplace=True))

    def finish_weight_update(self) -> None:
        """Every worker does the same, once all of them could load it."""
        for link in self._links:
            keep_adapter(link, self._folder)

    def shutdown(self) -> None:
        pass
