"""vLLM's weight-transfer engine `tracegrad_shm`: weights arrive as safetensors files.

Runs inside a vLLM worker (vLLM 0.32). The files are mapped, not copied; vLLM's layerwise reload
puts each tensor where the kernels want it. Two kinds of layers are packed for CPU kernels only at
the first load and would silently keep (part of) the old weights; they are packed again here:
output heads whose weight is tied to the embedding, and mixture-of-experts blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: an update names its files."""


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`paths`: safetensors files that together hold every weight, under checkpoint names."""

    paths: list[str]


class SafetensorsWeightTransferEngine(
    WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]  # type: ignore[misc]
):
    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # What a failed update had buffered must not be mixed into this one.
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        if current_platform.is_cpu():
            _unpad_for_cpu(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """Loads the files. Raises before the model is touched if one cannot be read or none is
        named, and ValueError naming the layers if the files do not hold the whole model."""
        if not update_info.paths:
            # All may have come before; it must fail all the same: a pusher ends an update so.
            raise ValueError("paths: the update names no files")
        with ExitStack() as stack:
            files = [
                stack.enter_context(safe_open(path, framework="pt")) for path in update_info.paths
            ]
            weights = _Weights(files)
            try:
                with disable_mtp_completeness_check():
                    self.model.load_weights(weights)
            except Exception as error:
                raise ValueError(f"{weights.current} does not fit: {error!r}") from error
        if missing := _missing_layers(self.model):
            raise ValueError(f"the update lacks weights of {', '.join(missing[:5])}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _repack_for_cpu(self.model)

    def shutdown(self) -> None:
        pass


class _Weights:
    """Iterates over (name, tensor); remembers where it is, for error messages."""

    def __init__(self, files: list[Any]) -> None:
        self._files = files
        self.current = "the first weight"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                tensor = file.get_tensor(name)
                self.current = f"{name} {tuple(tensor.shape)}"
                yield name, tensor


def _missing_layers(model: torch.nn.Module) -> list[str]:
    """Names of layers whose parameters did not all arrive."""
    tied = _tied_heads(model)
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = info.restore_metadata[0]
        # A layer that is complete was processed already and takes no more.
        if not info.can_load() or not parameters or layer in tied:
            continue
        # The vocabulary is padded to a multiple of 64, so an embedding never fills up.
        padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
        if not padded:
            missing.append(name)
    return missing


def _tied_heads(model: torch.nn.Module) -> set[torch.nn.Module]:
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return set()
    return {layer for layer in model.modules() if isinstance(layer, ParallelLMHead)}


def _unpad_for_cpu(model: torch.nn.Module) -> None:
    """Experts that were made wider for the kernel, again as wide as they are loaded: the reload
    copies into them. `_repack_for_cpu` makes them wider again."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not isinstance(layer, RoutedExperts) or info.can_load():
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            loaded = info.restore_metadata[0].get(name)
            if loaded is not None and parameter.shape != loaded.shape:
                parameter.data = parameter.new_empty(loaded.shape)


def _repack_for_cpu(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
        elif isinstance(layer, RoutedExperts):
            kernel = layer.quant_method.moe_kernel
            assert kernel is not None, "a served expert block has its kernel"
            kernel.fused_experts.process_weights_after_loading(layer)
