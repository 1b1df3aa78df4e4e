"""One optimizer step over micro-batches, the same for any packing and any number of ranks.

Losses are summed, never averaged, on the way; the denominator is counted over all ranks and
divided out of the gradients after backward, together with FSDP's mean over ranks. That is also
what lets a row that turns out non-finite leave the step without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.objectives import ObjectiveSettings, summarise
from tracegrad_trainer.stopwatch import Stopwatch

from . import routing, value
from .accumulate import Accumulated, accumulate
from .engine import Engine
from .flops import flops
from .forward import Inputs, forward, hidden_of
from .head_choice import choose
from .optimizer import local_gradients, make_optimizer, rate, squared_norm
from .prepass import prepass
from .reference import reference_of
from .settings import OptimSettings
from .wrap import compute_device

# Mean |log old - log mu| (nats a token) from which the two engines do not agree on the weights
# that were just pushed. In float32 they are 1e-5 apart, in bfloat16 some hundredths.
MISMATCH = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The same on every rank, but for `speed`. `dropped` are row keys whose numbers were not
    finite, and rows that were paired with those.

    Not `applied`: weights and optimizer are as they were, and nothing was trained.
    `mismatch`: a line for people when serving and training engine disagree about tokens of the
    current version, more than rounding explains; `metrics["mismatch"]` is then 1.
    `speed`: seconds of `prepass`, `forward_backward` and `apply`, and `tokens_per_s`; apart from
    the metrics, which are the same for the same inputs.
    """

    applied: bool
    metrics: dict[str, float]
    dropped: tuple[int, ...] = ()
    mismatch: str | None = None
    speed: dict[str, float] = field(default_factory=dict, compare=False)


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
        reference: nn.Module | None = None,
        head_elements: int | None = None,
    ) -> None:
        """`model` is what `shard` returned; `reshard` as in `FsdpSettings`. `reference` is
        frozen and sharded too (`build_reference`); adapters need none.

        Raises:
            ValueError: the objective needs a reference or a value head that is not there.
        """
        self.model = model
        self.mesh = mesh
        self.objective = objective
        self.optim = optim
        self.reshard = reshard
        self.steps = 0  # optimizer steps applied
        self.device = compute_device(mesh)
        self.optimizer = make_optimizer(model, optim)
        if "value" in objective.needs and not value.attached(model):
            raise ValueError("this objective learns values: put a value head on before `shard`")
        head = choose(model, self.device, elements=head_elements)
        needs_reference = "reference" in objective.needs
        self.engine = Engine(
            model,
            head,
            mesh,
            self.device,
            reference_of(model, head, reference, self.device) if needs_reference else None,
        )
        self.engine.rest()

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The training engine's log-probabilities, f32[n] of each micro-batch's targets."""
        inputs = self.engine.inputs(micro_batches)
        found = [forward(self.model, one, self.engine.head).logp for one in inputs]
        self.engine.rest()
        return found

    @torch.no_grad()
    def routed(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The same, with the experts that a mixture's routers choose now: what later steps on
        this batch replay (`fsdp.routing = "r2"`). At a batch's first step it changes nothing."""
        with routing.recording(self.model) as seen:
            for one in self.engine.inputs([replace(b, routes=None) for b in micro_batches]):
                hidden_of(self.model, one)
        self.engine.rest()
        return [replace(b, routes=routes) for b, routes in zip(micro_batches, seen, strict=True)]

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        version: int,
        old: Sequence[Tensor] | None = None,
        mismatched: Sequence[MicroBatch] = (),
    ) -> StepResult:
        """One optimizer step; as many micro-batches on every rank, mismatched ones likewise.

        Args:
            version: the current policy version, which on-policy tokens carry.
            old: log-probabilities at the start of the batch, from `logprobs`; without them the
                current ones are taken, which they are at a batch's first step.
            mismatched: of KTO, rows whose targets answer another row; only looked at.
        """
        watch = Stopwatch()
        inputs, done = self._gradients(micro_batches, version, old, mismatched, watch)
        total, largest = done.totals.reduced(self.engine)
        dropped: list[int] = []
        if total["wrong"]:
            # Some row is not finite, and through the shared weights' gradients it spoilt the
            # rest: once more without such rows. Ranks without one repeat too.
            dropped = self.engine.gather(done.bad_rows(inputs))
            left, old = _without(dropped, micro_batches, old)
            _, done = self._gradients(left, version, old, mismatched, watch)
            total, largest = done.totals.reduced(self.engine)
        metrics = summarise(total, largest)
        mismatch = self._mismatch(metrics)
        applied, of_step = self._apply(total)
        metrics |= of_step | {
            "rows_dropped": float(len(dropped)),
            "mismatch": float(mismatch is not None),
            "tokens": total["tokens_in"],
            "flops": total["flops"],
        }
        self._lap(watch, "apply")
        seconds = watch.take()
        speed = seconds | {"tokens_per_s": total["tokens_in"] / max(sum(seconds.values()), 1e-9)}
        return StepResult(
            applied=applied,
            metrics=metrics,
            dropped=tuple(dropped),
            mismatch=mismatch,
            speed=speed,
        )

    def _gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        version: int,
        old: Sequence[Tensor] | None,
        mismatched: Sequence[MicroBatch],
        watch: Stopwatch,
    ) -> tuple[list[Inputs], Accumulated]:
        """The gradients of this rank's shards, and the totals of its micro-batches."""
        self.optimizer.zero_grad()
        inputs = self.engine.inputs(micro_batches)
        before = prepass(self.engine, self.objective, inputs, old, mismatched)
        self._lap(watch, "prepass")
        done = accumulate(
            self.engine, self.objective, inputs, before, version=version, reshard=self.reshard
        )
        squares = squared_norm(local_gradients(self.model), self.device)
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
        return inputs, done

    def _apply(self, total: dict[str, float]) -> tuple[bool, dict[str, float]]:
        """Scale, clip, step."""
        # FSDP has averaged over ranks; what is wanted is the sum over the denominator.
        scale = self.mesh.size() / max(total["units"], 1e-9)
        norm = total["grad_squared"] ** 0.5 * scale
        applied = math.isfinite(norm) and total["units"] > 0
        lr = rate(self.optim, self.steps)
        if applied:
            clip = min(1.0, self.optim.max_grad_norm / max(norm, 1e-12))
            torch._foreach_mul_(local_gradients(self.model), scale * clip)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        return applied, {"grad_norm": norm, "lr": lr, "step_skipped": float(not applied)}

    def _mismatch(self, metrics: dict[str, float]) -> str | None:
        bound = MISMATCH.get(self.engine.head.dtype, MISMATCH[torch.float32])
        if not metrics["gap_tokens"] or metrics["gap_mean"] <= bound:
            return None
        return (
            f"serving and training engine differ by {metrics['gap_mean']:.2g} nats a token"
            f" (at most {metrics['gap_max']:.2g}) over {metrics['gap_tokens']:.0f} tokens of the"
            f" current version, {bound:g} would be rounding: are the served weights, the"
            " tokenizer and the sampling parameters (temperature, top-p) the trainer's?"
        )

    def _lap(self, watch: Stopwatch, stage: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        watch.lap(stage)


def _without(
    keys: Sequence[int], micro_batches: Sequence[MicroBatch], old: Sequence[Tensor] | None
) -> tuple[list[MicroBatch], list[Tensor] | None]:
    left = [batch.without(keys) for batch in micro_batches]
    kept = None
    if old is not None:
        kept = [
            values[torch.from_numpy(stay).to(values.device)]
            for values, (_, stay) in zip(old, left, strict=True)
        ]
    return [batch for batch, _ in left], kept
