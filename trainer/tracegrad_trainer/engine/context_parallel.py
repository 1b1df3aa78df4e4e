"""Context parallelism: the ranks of a group share the tokens of a micro-batch, for rows that are
too long for one device, and for steps in which one long row keeps all other ranks waiting.

Each rank of a group has the same micro-batch and computes its slice of the tokens. Attention alone
needs the others': before it ranks exchange tokens for heads, so that each has whole rows and some
of the heads, and behind it they exchange them back (DeepSpeed-Ulysses, arXiv 2309.14509). So what
attends is what attends without a group, with windows, caps, sinks and trees. (torch's ring
attention is of one causal sequence: it knows no rows.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from tracegrad_trainer.engine.attention.dispatch import RowAttention
from tracegrad_trainer.engine.attention.masked import (
    Attended,
    Keys,
    Queries,
    ScoreTransform,
    Values,
)
from tracegrad_trainer.engine.distributed import new_mesh, not_divisible


@dataclass(frozen=True, slots=True, eq=False)
class ContextParallel:
    """A mesh of two axes: `data`, of groups with micro-batches of their own, and `context`, of the
    ranks that share one."""

    mesh: DeviceMesh

    @classmethod
    def of(cls, ranks: DeviceMesh, size: int) -> ContextParallel | None:
        """Groups of `size` neighbours; None: each rank has its own micro-batches. A collective.

        Raises:
            ValueError: the ranks cannot be divided so.
        """
        if size == 1:
            return None
        if problem := not_divisible(ranks.size(), "context_parallel", size):
            raise ValueError(problem)
        shape = (ranks.size() // size, size)
        return cls(new_mesh(ranks, shape, ("data", "context")))

    @property
    def data(self) -> DeviceMesh:
        """The ranks that together have every micro-batch once, this one among them."""
        return self.mesh["data"]

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("context")

    @property
    def size(self) -> int:
        return self.mesh.size(1)

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank("context")

    def slice_of(self, tokens: int) -> slice:
        """This rank's; the last ones may reach beyond the tokens."""
        each = math.ceil(tokens / self.size)
        return slice(self.rank * each, (self.rank + 1) * each)

    def shard(self, values: Int64[NDArray[np.int64], " tokens"]) -> NDArray[np.int64]:
        """This rank's slice, filled up with zeros."""
        here = self.slice_of(len(values))
        own = values[here]
        return np.pad(own, (0, here.stop - here.start - len(own)))

    def own_targets(
        self, source: Int64[NDArray[np.int64], " n"], tokens: int
    ) -> Int64[NDArray[np.int64], " own"]:
        """Numbers of the targets that are predicted from this rank's tokens."""
        here = self.slice_of(tokens)
        return np.flatnonzero((source >= here.start) & (source < here.stop))

    def gather_targets(
        self, own: Float[Tensor, " own"], places: Int64[Tensor, " own"], targets: int
    ) -> Float[Tensor, " n"]:
        """Numbers of all targets from each rank's own; the gradient of its own ones comes back. So
        what every rank of the group computes of them alike is counted once."""
        gathered: Any = _GatherTargets.apply
        found: Tensor = gathered(own, places, targets, self.group)
        return found


class _GatherTargets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, places: Tensor, targets: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(places)
        every = own.new_zeros(targets)
        every[places] = own
        dist.all_reduce(every, group=group)
        return every

    @staticmethod
    def backward(ctx: Any, of_every: Tensor) -> tuple[Tensor | None, ...]:
        [places] = ctx.saved_tensors
        return of_every[places], None, None, None


class ContextParallelAttention:
    """The attention of `rows`, of `tokens` tokens in all, where each rank has a slice of them."""

    def __init__(self, rows: RowAttention, tokens: int, context: ContextParallel) -> None:
        self.rows = rows
        self.tokens = tokens
        self.context = context

    def attend(self, query: Queries, key: Keys, value: Values, scores: ScoreTransform) -> Attended:
        key, value = (self._divisible(x) for x in (key, value))
        q, k, v = (self._to_heads(x) for x in (query, key, value))
        if scores.sinks is not None:
            each = query.shape[1] // self.context.size
            scores = replace(scores, sinks=scores.sinks.narrow(0, self.context.rank * each, each))
        return self._to_tokens(self.rows.attend(q, k, v, scores))

    def _divisible(self, x: Keys | Values) -> Tensor:
        """Each key's head as often as it takes for every rank to have one of those it needs."""
        heads = x.shape[1]
        return x.repeat_interleave(repeats_of(heads, self.context.size), dim=1)

    def _to_heads(self, x: Float[Tensor, "1 heads slice width"]) -> Tensor:
        """[1, heads / ranks, tokens, width]."""
        ranks = self.context.size
        _, heads, slice_, width = x.shape
        by_heads = x[0].reshape(ranks, heads // ranks, slice_, width)
        by_tokens = self._exchange(by_heads)
        whole = by_tokens.transpose(0, 1).reshape(1, heads // ranks, ranks * slice_, width)
        return whole[:, :, : self.tokens].contiguous()

    def _to_tokens(self, x: Float[Tensor, "1 tokens own_heads width"]) -> Tensor:
        """[1, slice, heads, width]."""
        ranks = self.context.size
        _, tokens, heads, width = x.shape
        each = math.ceil(tokens / ranks)
        filled = F.pad(x[0], (0, 0, 0, 0, 0, each * ranks - tokens))
        by_heads = self._exchange(filled.reshape(ranks, each, heads, width))
        whole = by_heads.transpose(0, 1).reshape(1, each, ranks * heads, width)
        # No view: of a slice of one token torch.compile does not find the strides again. What comes
        # behind would copy it as well.
        return whole.clone(memory_format=torch.contiguous_format)

    def _exchange(self, x: Float[Tensor, "ranks ..."]) -> Float[Tensor, "ranks ..."]:
        """The i-th part to rank i of the group; the i-th that comes back is from it."""
        found: Tensor = all_to_all_single_autograd(x.contiguous(), None, None, self.context.group)
        return found


def repeats_of(kv_heads: int, ranks: int) -> int:
    """How often each head of keys and values is needed, for `ranks` to have equally many."""
    return ranks // math.gcd(kv_heads, ranks)
