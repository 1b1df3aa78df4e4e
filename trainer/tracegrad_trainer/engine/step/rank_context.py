"""What one rank computes with: the model, how it is asked, and who else takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tracegrad_trainer.batches import MicroBatch, PackingRule
from tracegrad_trainer.engine.context_parallel import ContextParallel
from tracegrad_trainer.engine.model.forward import LmHead, ModelInputs, to_inputs
from tracegrad_trainer.engine.model.reference import ReferencePolicy

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RankContext:
    model: nn.Module
    head: LmHead
    mesh: DeviceMesh
    device: torch.device
    reference: ReferencePolicy | None = None
    context: ContextParallel | None = None
    packing: PackingRule = field(default_factory=PackingRule)

    @property
    def data(self) -> dist.ProcessGroup:
        """Ranks that together have each micro-batch once: what is counted of those is added up over
        these ranks."""
        found = group.WORLD if self.context is None else self.context.data.get_group()
        assert found is not None
        return found

    def inputs(
        self, micro_batches: Sequence[MicroBatch], model: nn.Module | None = None
    ) -> list[ModelInputs]:
        """For the policy, or for another `model`."""
        asked = self.model if model is None else model
        return [to_inputs(batch, asked, self.device, self.context) for batch in micro_batches]

    def all_reduce_sum(
        self, values: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Over all micro-batches, in place."""
        dist.all_reduce(values, how, group=self.data)
        return values

    def sum_over_context(self, values: Tensor) -> Tensor:
        """Over the ranks that share a micro-batch, in place: of what is not of micro-batches."""
        if self.context is not None:
            dist.all_reduce(values, group=self.context.group)
        return values

    def gather_unique(self, mine: list[int]) -> list[int]:
        """Everyone's, without doubles, in order."""
        return sorted({one for some in self.all_gather(mine) for one in some})

    def all_gather(self, mine: T) -> list[T]:
        """That of each rank of `data`, by rank."""
        everyone: list[Any] = [None] * self.data.size()
        dist.all_gather_object(everyone, mine, group=self.data)
        return everyone

    def reshard(self) -> None:
        """After forwards without gradient: the root's parameters go back into shards.

        Whole ones would stay, and be what the next forward uses, whatever a step, a checkpoint
        or a gather makes of the shards meanwhile.
        """
        models = [self.model] if self.reference is None else [self.model, self.reference.model]
        for model in models:
            if isinstance(model, FSDPModule):
                model.reshard()
