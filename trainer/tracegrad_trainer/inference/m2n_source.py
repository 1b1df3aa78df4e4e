"""The learner's weights as vLLM's `nccl_m2n` takes them: each rank's own shards, under the names of
model folders.

What a folder has in other pieces than the learner (stacked experts, renamed parts), vectors, and
what cannot be divided evenly over the ranks is gathered and counts as a copy on every rank. Needs
vLLM in the ranks' processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.m2n_common import (
    REPLICATED,
    M2NMesh,
    M2NParamMeta,
    Placements,
    resolve_layout,
    validate_layout,
)
from vllm.distributed.weight_transfer.m2n_source import (
    M2NWeightSource,
    mesh_from_tensor,
    placements_from_tensor,
)

from tracegrad_trainer.engine import as_hf_tensors
from tracegrad_trainer.engine.checkpoint.hf_export import persistent_buffers
from tracegrad_trainer.engine.model.value_head import is_value_parameter

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of the served model. `shard_of`: the learner's parameter whose shard a rank sends;
    None: whole."""

    meta: M2NParamMeta
    shard_of: str | None


class LearnerSource(M2NWeightSource):  # type: ignore[misc]
    """Of all ranks together, in one order. Iterating is a collective."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        beside: Callable[[], Named] = tuple,
    ) -> None:
        """`dtype`: of matrices, as they are served; vectors stay as they are. `device`: where NCCL
        takes them from. `beside`: what is served and not trained."""
        self._model, self._dtype, self._device, self._beside = model, dtype, device, beside
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())

    def mesh(self) -> M2NMesh:
        """Over which every parameter of a model of ours is sharded: all ranks."""
        sharded = (p for p in self._parameters.values() if isinstance(p, DTensor))
        ranks = dist.get_world_size()
        found: M2NMesh = mesh_from_tensor(next(sharded, torch.empty(0)), ranks)
        return found

    def metadata(self) -> list[ParamMeta]:
        return [piece.meta for piece in self._plan]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        plan = {piece.meta.name: piece for piece in self._plan}
        for name, tensor in self._whole(self._gathered()):
            piece = plan[name]
            if piece.shard_of is not None:
                shard = self._parameters[piece.shard_of]
                assert isinstance(shard, DTensor)
                tensor = shard.to_local()
            yield name, tensor.detach().to(self._device, piece.meta.dtype)

    @cached_property
    def _plan(self) -> list[_Piece]:
        """By tensors without storage: nothing is gathered."""
        named = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            for name, parameter in _served(self._model)
        }
        # Only what comes out of the conversion as it went in is a shard of the same tensor.
        known = {id(tensor): name for name, tensor in named.items()}
        return [
            self._piece(name, tensor, known.get(id(tensor)))
            for name, tensor in self._whole(iter(named.items()))
        ]

    def _piece(self, name: str, tensor: Tensor, source: str | None) -> _Piece:
        dtype = self._dtype if tensor.ndim >= 2 and tensor.is_floating_point() else tensor.dtype
        placements: Placements | None = REPLICATED
        if source is not None and tensor.ndim >= 2:
            placements = self._sharded(source)
        return _Piece(
            M2NParamMeta(name, dtype, tuple(tensor.shape), placements),
            None if placements is REPLICATED else source,
        )

    def _sharded(self, name: str) -> Placements | None:
        """None: it is whole on every rank, or its shards differ in size."""
        parameter = self._parameters.get(name)
        if not isinstance(parameter, DTensor):
            return REPLICATED
        placements: Placements | None = placements_from_tensor(parameter)
        if placements is REPLICATED:
            return REPLICATED
        try:
            mesh, resolved = resolve_layout(self.mesh(), placements)
            validate_layout(mesh, resolved, parameter.shape, "source")
        except ValueError:
            return REPLICATED
        return placements

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors where those are sent; in place of the others ones without storage."""
        shards = {piece.shard_of for piece in self._plan} - {None}
        for name, parameter in _served(self._model):
            if name in shards:
                yield name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            else:
                yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _whole(self, trained: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        yield from as_hf_tensors(self._model, trained)
        yield from self._beside()


def _served(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `full_tensors`, of a model without adapters, and nothing is gathered."""
    for name, parameter in model.named_parameters():
        if not is_value_parameter(name):
            yield name, parameter.detach()
    yield from persistent_buffers(model)
