"""One optimizer step over micro-batches, the same for any packing and any number of ranks.

Losses are summed, never averaged, on the way; the denominator is counted over all ranks and
divided out of the gradients after backward, together with FSDP's mean over ranks. That is also
what lets a row that turns out non-finite leave the step without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tracegrad_trainer.batches import MicroBatch, PackingRule
from tracegrad_trainer.engine.config import ADAMW, AdamwImplementation, OptimSettings
from tracegrad_trainer.engine.context_parallel import ContextParallel
from tracegrad_trainer.engine.distributed import compute_device
from tracegrad_trainer.engine.flops import flops, packing_rule
from tracegrad_trainer.engine.model import value_head
from tracegrad_trainer.engine.model.forward import TargetContext, forward
from tracegrad_trainer.engine.model.lm_head import choose_lm_head
from tracegrad_trainer.engine.model.reference import reference_of
from tracegrad_trainer.engine.step.accumulate import Accumulated, accumulate, rows_to_drop
from tracegrad_trainer.engine.step.optimizer import (
    apply_share_of_step,
    copies_of_shards,
    learning_rate,
    local_gradients,
    make_optimizer,
    squared_norm,
    trained_parameters,
    value_learning_rate,
)
from tracegrad_trainer.engine.step.prepass import prepass
from tracegrad_trainer.engine.step.rank_context import RankContext
from tracegrad_trainer.engine.step.result import StepResult, UpdateResult, result_of
from tracegrad_trainer.engine.step.rollout_sums import with_rollout_sums
from tracegrad_trainer.losses import ObjectiveSettings
from tracegrad_trainer.losses.logprob_gap import Precision, coarser, precision_of
from tracegrad_trainer.utils.stopwatch import Stopwatch


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
        context: ContextParallel | None = None,
        sharing: ContextParallel | None = None,
        reference: nn.Module | None = None,
        head_elements: int | None = None,
        adamw: AdamwImplementation = ADAMW,
        packing: PackingRule | None = None,
        serving: Precision = "float32",
    ) -> None:
        """`model` is what `shard` returned; `reshard` as in `FsdpSettings`. With a `context` its
        groups of ranks get the same micro-batches, always; with `sharing` in the steps that are
        quicker by it. `reference` is frozen and sharded too (`build_reference`); adapters need
        none. `adamw` other than the default is for steps that were taken with it, and so `packing`
        (default: by the model's costs). `serving`: the engine's that samples.

        Raises:
            ValueError: the objective needs a reference or a value head that is not there.
        """
        self.model = model
        self.mesh = mesh
        self.objective = objective
        self.optim = optim
        self.reshard = reshard
        self.steps = 0  # optimizer steps applied
        self.entropy_coef = objective.entropy_coef  # adapted where the entropy has a target
        self.device = compute_device(mesh)
        self.adamw = adamw
        self.optimizer = make_optimizer(model, optim, adamw)
        self.policy, self.critic = trained_parameters(model)
        self._copies = copies_of_shards(model)
        if "value" in objective.needs and not value_head.has_value_head(model):
            raise ValueError("this objective learns values: put a value head on before `shard`")
        head = choose_lm_head(model, self.device, elements=head_elements)
        needs_reference = "reference" in objective.needs
        self.engine = RankContext(
            model,
            head,
            mesh,
            self.device,
            reference_of(model, head, reference, self.device) if needs_reference else None,
            context,
            packing_rule(model, 1 if sharing is None else sharing.size)
            if packing is None
            else packing,
        )
        assert self.engine.packing.group == (1 if sharing is None else sharing.size)
        assert sharing is None or context is None
        self._sharing = sharing
        # What rounding may put between the log-probabilities of the two engines.
        self.precision = coarser(_precision(head.dtype), serving)
        self.engine.reshard()

    @contextmanager
    def sharing_rows(self, chosen: bool) -> Iterator[None]:
        """Meanwhile, if that is `chosen`, groups of ranks get the same micro-batches."""
        alone = self.engine
        if chosen:
            self.engine = replace(alone, context=self._sharing)
        try:
            yield
        finally:
            self.engine = alone

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The training engine's log-probabilities, f32[n] of each micro-batch's targets."""
        inputs = self.engine.inputs(micro_batches)
        found = [forward(self.model, one, self.engine.head).policy_logprobs for one in inputs]
        self.engine.reshard()
        return found

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        version: int,
        before: Sequence[TargetContext] | None = None,
        mismatched: Sequence[MicroBatch] = (),
        share: float = 1.0,
    ) -> StepResult:
        """One optimizer step: `update`, and what came of it."""
        update = self.update(
            micro_batches, version=version, before=before, mismatched=mismatched, share=share
        )
        return result_of([update], precision=self.precision, dropped=update.dropped)

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        version: int,
        before: Sequence[TargetContext] | None = None,
        mismatched: Sequence[MicroBatch] = (),
        share: float = 1.0,
    ) -> UpdateResult:
        """One optimizer step; as many micro-batches on every rank, mismatched ones likewise.

        Args:
            version: the current policy version, which on-policy tokens carry.
            before: of each micro-batch what is known already. Without old log-probabilities the
                current ones are taken, which they are at a batch's first step.
            mismatched: of KTO, rows whose targets answer another row; only looked at.
            share: how much of a whole step this one is, as in `apply_share_of_step`.
        """
        watch = Stopwatch()
        known = [TargetContext()] * len(micro_batches) if before is None else before
        done = self._gradients(micro_batches, version, known, mismatched, watch)
        sums, maxima = done.totals.all_reduced(self.engine)
        dropped: list[int] = []
        if sums["wrong"]:
            # Some row is not finite, and through the shared weights' gradients it spoilt the
            # rest: once more without such rows. Ranks without one repeat too.
            dropped = rows_to_drop(self.engine, self.objective, done.non_finite, micro_batches)
            left, known = without_rows(dropped, micro_batches, known)
            done = self._gradients(left, version, known, mismatched, watch)
            sums, maxima = done.totals.all_reduced(self.engine)
        # FSDP has averaged over ranks; what is wanted is the sum over the denominator.
        scale = self.mesh.size() / max(sums["units"], 1e-9)
        norm = sums["grad_squared"] ** 0.5 * scale
        applied = math.isfinite(norm) and sums["units"] > 0
        lrs = [rate * share for rate in self._rates()]
        alone, coef = self._critic_alone, self.entropy_coef
        if applied:
            clip = min(1.0, self.optim.max_grad_norm / max(norm, 1e-12))
            self._apply(scale * clip, lrs, share)
            if not alone and sums["sampled"]:
                mean = sums["entropy_sampled"] / sums["sampled"]
                self.entropy_coef = self.objective.next_entropy_coef(coef, mean)
        self.optimizer.zero_grad()
        self._lap(watch, "apply")
        return UpdateResult(
            applied=applied,
            sums=sums,
            maxima=maxima,
            grad_norm=norm,
            lr=lrs[0],
            value_lr=lrs[1] if self.critic else None,
            value_only=alone,
            entropy_coef=coef if self.objective.has_entropy else None,
            dropped=tuple(dropped),
            seconds=watch.take(),
        )

    def _gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        version: int,
        known: Sequence[TargetContext],
        mismatched: Sequence[MicroBatch],
        watch: Stopwatch,
    ) -> Accumulated:
        """The gradients of this rank's shards, and the totals of its micro-batches."""
        self.optimizer.zero_grad()
        inputs = self.engine.inputs(micro_batches)
        before = prepass(self.engine, self.objective, inputs, known, mismatched)
        before = with_rollout_sums(self.engine, self.objective, inputs, before)
        self._lap(watch, "prepass")
        done = accumulate(
            self.engine,
            self.objective,
            inputs,
            before,
            version=version,
            reshard=self.reshard,
            entropy_coef=self.entropy_coef,
        )
        learning = self.critic if self._critic_alone else [*self.policy, *self.critic]
        squares = squared_norm(local_gradients(learning), self.device) / self._copies
        self.engine.sum_over_context(squares)  # each rank has shards of its own, or its replicas'
        # What fills up a rank's micro-batches is no part of the step.
        real = [batch for batch in micro_batches if (batch.row_keys >= 0).any()]
        counted = {
            "tokens_in": sum(batch.tokens for batch in real),
            "flops": sum(flops(self.model, batch) for batch in real),
        }
        done.totals.add(
            {"grad_squared": squares, **{k: squares.new_tensor(v) for k, v in counted.items()}}, {}
        )
        self._lap(watch, "forward_backward")
        return done

    @property
    def adapted_entropy_coef(self) -> float | None:
        """The entropy bonus's coefficient where it has a target: a state, kept in checkpoints."""
        return None if self.objective.entropy_target is None else self.entropy_coef

    @property
    def _critic_alone(self) -> bool:
        return bool(self.critic) and self.steps < self.optim.value_warmup_steps

    def _rates(self) -> tuple[float, float]:
        """Of the policy and of the value head."""
        before = self.optim.value_warmup_steps if self.critic else 0
        own = 0.0 if self.steps < before else learning_rate(self.optim, self.steps - before)
        return own, value_learning_rate(self.optim, self.steps)

    def _apply(self, scale: float, lrs: Sequence[float], share: float) -> None:
        alone = self._critic_alone
        if alone:  # also what may not be finite: it is no part of the norm
            for gradient in local_gradients(self.policy):
                gradient.zero_()
        torch._foreach_mul_(local_gradients([*self.policy, *self.critic]), scale)
        for group in self.optimizer.param_groups:
            of_critic = any(group["params"][0] is one for one in self.critic)
            group["lr"] = lrs[of_critic]
        apply_share_of_step(self.optimizer, share)
        if alone:  # the policy's moments begin with its own first step
            for parameter in self.policy:
                if parameter in self.optimizer.state:
                    self.optimizer.state[parameter]["step"].zero_()
        self.steps += 1

    def _lap(self, watch: Stopwatch, stage: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        watch.lap(stage)


def _precision(dtype: torch.dtype) -> Precision:
    # TF32 has about as many bits as bfloat16.
    exact = torch.get_float32_matmul_precision() == "highest"
    return precision_of(dtype) if exact else "bfloat16"


def without_rows(
    keys: Sequence[int], micro_batches: Sequence[MicroBatch], known: Sequence[TargetContext]
) -> tuple[list[MicroBatch], list[TargetContext]]:
    """Both less the rows of these keys, and less those that they are paired with."""
    left = [batch.without_rows(keys) for batch in micro_batches]
    return (
        [batch for batch, _ in left],
        [one.select(torch.from_numpy(stay)) for one, (_, stay) in zip(known, left, strict=True)],
    )
