"""Layers that carry a state along a row: linear attention, state spaces, short convolutions.

They have no mask that could keep the rows of a pack apart. Each path of it, a row or a tree's way
from root to leaf, is given to them by itself (`attention.padded_paths`): the model's own code runs
as it is, with whatever kernels it has.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, UntypedStorage, nn

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.attention.padded_paths import PaddedPaths
from tracegrad_trainer.engine.model.hf_config import transformer_blocks

_TOKENS = 1024  # some chunks of any kind of layer


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """In order: what of transformers' blocks takes the state of a cache, or is named as one is that
    takes it under attention's name (LFM 2)."""
    found: dict[nn.Module, None] = {}  # once each: blocks hold blocks in some (Mamba, Zamba)
    for block in transformer_blocks(model):
        inner = [module for module in block.modules() if _is_recurrent(module)]
        # Some blocks hand the state on (Mamba 2's, Zamba 2's): the innermost is the layer.
        own = (one for one in inner if not any(_is_recurrent(m) for m in _below(one)))
        found |= dict.fromkeys(own)
    return list(found)


def keep_paths_apart(model: nn.Module) -> None:
    """Make the model's forward take the keyword `token_paths`, a `PaddedPaths`, if it has recurrent
    layers. In place.

    What was given holds until the next forward: a checkpointed block runs again in backward. A
    forward without it is refused there (ValueError): rows would run into each other.
    """
    layers = recurrent_layers(model)
    if not layers:
        return
    state: dict[str, PaddedPaths | None] = {"paths": None}
    for layer in layers:
        _follow(layer, state, type(model).__name__)
    backbone: Any = model.base_model

    def take(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state["paths"] = kwargs.pop("token_paths", None)
        return args, kwargs

    backbone.register_forward_pre_hook(take, with_kwargs=True)
    model.tracegrad_recurrent_layers = layers  # type: ignore[assignment]


def is_installed(model: nn.Module) -> bool:
    return hasattr(model, "tracegrad_recurrent_layers")


def paths_of(batch: MicroBatch, device: torch.device) -> PaddedPaths:
    lengths = batch.row_lengths.tolist()
    if batch.subtree_end is None:
        return PaddedPaths.of_rows(lengths, device)
    return PaddedPaths.of_trees(batch.subtree_end, lengths, device)


def kept_bytes(layer: nn.Module, hidden_size: int) -> float:
    """What a layer keeps for backward, a token, in float32, as transformers' own code computes it:
    found by a forward without storage. 0 where kernels do it, which keep little and need a device.
    """
    shapes = copy.deepcopy(layer).to("meta")
    own = {p.untyped_storage()._cdata for p in shapes.parameters()}
    kept: dict[int, UntypedStorage] = {}  # held, or another would get its number

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    given = torch.empty(1, _TOKENS, hidden_size, device="meta", requires_grad=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            type(shapes).forward(shapes, given)
    except Exception:  # of any package that brings kernels
        return 0.0
    return sum(one.nbytes() for key, one in kept.items() if key not in own) / _TOKENS


def _is_recurrent(module: nn.Module) -> bool:
    if type(module).__name__.endswith("ShortConv"):
        return True
    return "cache_params" in inspect.signature(type(module).forward).parameters


def _below(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if inner is not module]


def _follow(layer: nn.Module, state: dict[str, PaddedPaths | None], kind: str) -> None:
    own = layer.forward

    # Blocks are Python's, and as many as a micro-batch happens to have.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        hidden_states: Float[Tensor, "_ _ _"], *args: Any, **kwargs: Any
    ) -> Float[Tensor, "_ _ _"]:
        paths = state["paths"]
        if paths is None:
            raise ValueError(
                f"{kind} does not hand keyword arguments to the layers that carry a state along a"
                " row: such models cannot be trained here"
            )
        kwargs["attention_mask"] = None  # of the pack; padding is behind all that counts
        assert hidden_states.shape[:2] == (1, len(paths.back)), "the paths of another micro-batch"
        each = [own(hidden_states[0, block], *args, **kwargs) for block in paths.blocks]
        return paths.join(each)[None]

    layer.forward = forward
