"""New weights made ready in a vLLM worker while the old ones serve; then put in place at once.

Loading, fusing and packing weights for CPU kernels takes as long as the model is large. Here it is
done on shadows: copies of the model's layers that share everything but their tensors. vLLM's
layerwise reload (0.32) fills a shadow as it would fill its layer. What is left for the pause is to
hand each layer what its shadow has, which copies nothing. While both are there the worker needs
memory for the weights twice, so this is for host memory, and where there is room in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel
from vllm.platforms import current_platform

from tracegrad.host_memory import free_host_memory

_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
# To stay free beside the second copy of the weights, and what packing takes meanwhile.
_SPARE_BYTES = 1 << 30


def can_stage(model: nn.Module, *, workers: int = 1) -> bool:
    """Whether shadows would be filled as the layers are, and fit into this host's memory: dense
    layers without quantization, whose loading concerns nothing but themselves. `workers`: of this
    engine, which all stage at the same time and may be on this host."""
    if not current_platform.is_cpu():
        return False
    size = 0
    for layer in model.modules():
        info = get_layerwise_info(layer)
        parameters, buffers = info.restore_metadata
        if info.can_load():  # an update has failed, and left it without weights
            return False
        if parameters and (buffers or not _is_plain(layer)):
            return False
        if parameters:  # vLLM's metadata have no biases
            own = dict(layer.named_parameters(recurse=False)) | dict(parameters)
            size += sum(tensor.nbytes for tensor in own.values())
    return 2 * size * workers + _SPARE_BYTES < free_host_memory()


def _is_plain(layer: nn.Module) -> bool:
    if isinstance(layer, LinearBase | VocabParallelEmbedding):
        return type(layer.quant_method) in _PLAIN
    return type(layer).__name__.endswith("Norm")


class StagedWeights:
    """`load` as often as it takes, `complete`, then `commit` between two forward passes; `close`
    in any case."""

    def __init__(self, model: nn.Module) -> None:
        self._shadows: list[tuple[nn.Module, nn.Module]] = []  # (layer, its shadow)
        self._root: Any = self._shadow_of(model, {})

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Whatever a model's `load_weights` raises: they do not fit."""
        with disable_mtp_completeness_check():
            self._root.load_weights(tensors)

    def complete(self) -> None:
        """Raises ValueError: layers whose weights did not all arrive."""
        for _, shadow in self._shadows:
            info = get_layerwise_info(shadow)
            # The vocabulary is padded to a multiple of 64, so an embedding never fills up.
            padded = isinstance(shadow, VocabParallelEmbedding) and info.load_numel > 0
            if info.can_load() and padded:
                _layerwise_process(shadow, info)
        for layer, shadow in self._shadows:
            if get_layerwise_info(shadow).can_load() and (embedding := self._tied_to(layer)):
                shadow._parameters["weight"] = embedding._parameters["weight"]
                method: Any = shadow.quant_method
                method.process_weights_after_loading(shadow)
                get_layerwise_info(shadow).reset()
        missing = [
            name
            for name, shadow in self._root.named_modules()
            if get_layerwise_info(shadow).can_load()
        ]
        if missing:
            raise ValueError(f"the update lacks weights of {', '.join(missing[:5])}")

    def commit(self) -> None:
        """Copies nothing: each layer takes the storage of its shadow's tensors, and what packing
        has left in other attributes."""
        for layer, shadow in self._shadows:
            for name, tensor in shadow._parameters.items():
                served = layer._parameters[name]
                if tensor is not None and served is not None:
                    served.data = tensor.data
            had, has = vars(layer), vars(shadow)
            for name in has.keys() - set(_PARTS):
                if had.get(name) is not has[name]:
                    had[name] = has[name]

    def close(self) -> None:
        """Gives the shadows' memory up. What vLLM knows of a layer, and each tensor's loader, refer
        to it, so that nobody else would."""
        for _, shadow in self._shadows:
            get_layerwise_info(shadow).reset()
            vars(shadow).clear()
        self._shadows.clear()
        self._root = None

    def _shadow_of(self, layer: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
        """It shares all of the layer but its tensors; children first, as they are tied last."""
        if id(layer) in made:
            return made[id(layer)]
        shadow = made[id(layer)] = copy.copy(layer)
        for part in _PARTS:
            vars(shadow)[part] = copy.copy(vars(layer)[part])
        for name, child in layer._modules.items():
            if child is not None:
                shadow._modules[name] = self._shadow_of(child, made)
        self._shadows.append((layer, shadow))
        _empty(layer, shadow)
        return shadow

    def _tied_to(self, head: nn.Module) -> nn.Module | None:
        """The shadow of the embedding that has this head's weight."""
        if not isinstance(head, ParallelLMHead):
            return None
        return next(
            (
                shadow
                for layer, shadow in self._shadows
                if layer is not head
                and isinstance(layer, VocabParallelEmbedding)
                and layer._parameters.get("weight") is head._parameters.get("weight")
            ),
            None,
        )


def _empty(layer: nn.Module, shadow: nn.Module) -> None:
    """The shadow becomes what a layer is before its first load."""
    known, info = get_layerwise_info(layer), get_layerwise_info(shadow)
    loaded, _ = known.restore_metadata
    fresh = {name: _like(tensor, layer, shadow) for name, tensor in loaded.items()}
    for name, tensor in layer._parameters.items():
        # vLLM loads a bias in place, and has none of it among what it restores.
        if name in SKIP_TENSORS and tensor is not None:
            fresh[name] = _like(tensor, layer, shadow)
    if not fresh:
        return
    shadow._parameters = dict(fresh)
    info.restore_device = known.restore_device
    initialize_online_processing(shadow)


def _like(tensor: Tensor, layer: nn.Module, shadow: nn.Module) -> Tensor:
    """A parameter for the shadow, with the attributes and loaders of the layer's own."""
    if tensor.is_meta:
        made: Tensor = to_meta_tensor(tensor)
    else:
        made = torch.empty_like(tensor.data)
        made.__class__, made.__dict__ = tensor.__class__, tensor.__dict__.copy()
    # A layer that was reloaded before has wrapped its loader.
    if hasattr(made, "weight_loader"):
        made.weight_loader = _get_original_loader(made)
    for name, value in vars(made).items():
        if isinstance(value, MethodType) and value.__self__ in (layer, layer_ref_sentinel):
            vars(made)[name] = value.__func__.__get__(shadow)
    return made
