"""One optimizer step over micro-batches, the same for any packing and any number of ranks.

Losses are summed, never averaged, on the way; the denominator is counted over all ranks and
divided out of the gradients after backward, together with FSDP's mean over ranks. That is also
what lets a row that turns out non-finite leave the step without a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.objectives import (
    ObjectiveSettings,
    evaluate,
    maxima,
    summarise,
    sums,
)

from .forward import Before, Inputs, forward, to_inputs, tokens_of
from .settings import OptimSettings
from .wrap import between_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The same on every rank. `dropped` are row keys whose numbers were not finite.

    Not `applied`: weights and optimizer are as they were, and nothing was trained.
    """

    applied: bool
    metrics: dict[str, float]
    dropped: tuple[int, ...] = ()


@dataclass(slots=True)
class _Totals:
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    bad_rows: list[int] = field(default_factory=list)

    def add(self, more: dict[str, Tensor], largest: dict[str, Tensor]) -> None:
        for name, value in more.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in largest.items():
            value = value.detach().double()
            known = self.maxima.get(name)
            self.maxima[name] = value if known is None else torch.maximum(known, value)


class Learner:
    """The training engine of one rank. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        objective: ObjectiveSettings,
        optim: OptimSettings,
        *,
        reshard: bool = True,
    ) -> None:
        """`model` is what `shard` returned; `reshard` as in `FsdpSettings`."""
        self.model = model
        self.mesh = mesh
        self.objective = objective
        self.optim = optim
        self.reshard = reshard
        self.steps = 0  # optimizer steps applied
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            foreach=True,
        )
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The training engine's log-probabilities, f32[n] of each micro-batch's targets."""
        return [
            forward(self.model, to_inputs(batch, self.model, self.device)).logp
            for batch in micro_batches
        ]

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        version: int,
        old: Sequence[Tensor] | None = None,
    ) -> StepResult:
        """One optimizer step; as many micro-batches on every rank.

        Args:
            version: the current policy version, which on-policy tokens carry.
            old: log-probabilities at the start of the batch, from `logprobs`; without them the
                current ones are taken, which they are at a batch's first step.
        """
        inputs = [to_inputs(batch, self.model, self.device) for batch in micro_batches]
        totals = self._accumulate(inputs, version, old)
        result, bad = self._apply(totals)
        if result is not None:
            return result
        # Some row is not finite, and through the shared weights' gradients it spoilt the rest:
        # once more without such rows. Ranks without one repeat too, for the collectives.
        left = [batch.without(bad) for batch in micro_batches]
        if old is not None:
            old = [
                values[torch.from_numpy(kept).to(self.device)]
                for values, (_, kept) in zip(old, left, strict=True)
            ]
        inputs = [to_inputs(batch, self.model, self.device) for batch, _ in left]
        result, _ = self._apply(self._accumulate(inputs, version, old), dropped=bad)
        assert result is not None
        return result

    def _accumulate(
        self, inputs: Sequence[Inputs], version: int, old: Sequence[Tensor] | None
    ) -> _Totals:
        totals = _Totals()
        self.optimizer.zero_grad()
        for i, one in enumerate(inputs):
            between_micro_batches(self.model, last=i == len(inputs) - 1, reshard=self.reshard)
            now = forward(self.model, one)
            tokens = tokens_of(one, now, Before(old=None if old is None else old[i]))
            done = evaluate(self.objective, tokens)
            torch.autograd.backward(done.total)
            with torch.no_grad():
                totals.add(sums(tokens, done, now.entropy, version), maxima(tokens, done, version))
                wrong = ~(torch.isfinite(tokens.logp) & torch.isfinite(tokens.old))
                if wrong.any():
                    rows = one.batch.row_keys[one.batch.row[wrong.cpu().numpy()]]
                    totals.bad_rows += sorted(set(rows.tolist()))
        return totals

    def _apply(
        self, totals: _Totals, dropped: Sequence[int] | None = None
    ) -> tuple[StepResult | None, list[int]]:
        """Reduce, scale, clip, step. (None, bad rows) asks for another go without those."""
        grads = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        total, largest = self._reduce(
            totals.sums
            | {"grad_squared": squares, "bad_rows": squares.new_tensor(len(totals.bad_rows))},
            totals.maxima,
        )
        if total["bad_rows"] and dropped is None:
            return None, self._all_bad_rows(totals.bad_rows)
        # FSDP has averaged over ranks; what is wanted is the sum over the denominator.
        scale = self.mesh.size() / max(total["units"], 1e-9)
        norm = total["grad_squared"] ** 0.5 * scale
        finite = norm < float("inf")
        applied = finite and total["units"] > 0
        metrics = summarise(total, largest) | {
            "grad_norm": norm,
            "lr": self._lr(),
            "rows_dropped": float(len(dropped or ())),
            "step_skipped": float(not applied),
        }
        if applied:
            clip = min(1.0, self.optim.max_grad_norm / max(norm, 1e-12))
            torch._foreach_mul_(grads, scale * clip)
            for group in self.optimizer.param_groups:
                group["lr"] = metrics["lr"]
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        return StepResult(applied=applied, metrics=metrics, dropped=tuple(dropped or ())), []

    def _reduce(
        self, totals: dict[str, Tensor], largest: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float]]:
        group = self.mesh.get_group()
        added = torch.stack(list(totals.values()))
        highest = torch.stack(list(largest.values()))
        dist.all_reduce(added, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        return (
            dict(zip(totals, added.tolist(), strict=True)),
            dict(zip(largest, highest.tolist(), strict=True)),
        )

    def _all_bad_rows(self, mine: list[int]) -> list[int]:
        everyone: list[list[int]] = [[] for _ in range(self.mesh.size())]
        dist.all_gather_object(everyone, mine, group=self.mesh.get_group())
        return sorted({row for rows in everyone for row in rows})

    def _lr(self) -> float:
        """By optimizer steps, never by rows or batches: how much a step holds may change."""
        optim = self.optim
        rising = (self.steps + 1) / optim.warmup_steps if optim.warmup_steps else 1.0
        falling = 1.0
        if optim.decay_steps is not None:
            falling = max(optim.lr_floor, 1 - self.steps / optim.decay_steps)
        return optim.lr * min(1.0, rising, falling)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
