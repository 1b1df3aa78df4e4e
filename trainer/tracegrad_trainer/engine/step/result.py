"""What came of a batch's optimizer steps, most often one, in the step's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tracegrad_trainer.engine.step.accumulate import GAP_HISTOGRAM
from tracegrad_trainer.losses.diagnostics import summarise_diagnostics
from tracegrad_trainer.losses.logprob_gap import (
    BINS,
    BOUNDS,
    LogprobGap,
    Precision,
    binned_quantile,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """One optimizer step. `sums` and `maxima` are over all micro-batches of all ranks; `seconds`
    this rank's, by stage. `value_only`: the value head alone learnt."""

    applied: bool
    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    grad_norm: float
    lr: float
    value_lr: float | None = None  # None: there is no value head
    value_only: bool = False
    entropy_coef: float | None = None  # that it was made with; None: entropy is no term
    dropped: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The same on every rank, but for `speed`. `dropped` are keys of rows that were not trained:
    their numbers were not finite, or they were paired with such a row.

    Not `applied`: weights and optimizer are as they were, and nothing was trained.
    `policy_moved`: applied, and not to the value head alone.
    `mismatch`: a line for people when serving and training engine disagree about tokens of the
    current version, more than rounding explains; `metrics["mismatch"]` is then 1.
    `speed`: seconds of `prepass`, `forward_backward` and `apply`, and `tokens_per_second`; apart
    from the metrics, which are the same for the same inputs.
    """

    applied: bool
    metrics: dict[str, float]
    dropped: tuple[int, ...] = ()
    mismatch: str | None = None
    policy_moved: bool = True
    speed: dict[str, float] = field(default_factory=dict, compare=False)


def result_of(
    updates: Sequence[UpdateResult], *, precision: Precision, dropped: Sequence[int]
) -> StepResult:
    """Of all optimizer steps on one batch, at least one; `precision` is the coarser engine's, of
    serving and training.

    Shares and means are over the tokens of all of them: with several passes over a batch its
    tokens count in each.
    """
    sums = _together([update.sums for update in updates], sum)
    maxima = _together([update.maxima for update in updates], max)
    metrics = summarise_diagnostics(sums, maxima)
    gap = _gap(metrics, sums)
    mismatch = _mismatch(gap, precision) if gap.tokens else None
    applied = [update for update in updates if update.applied]
    norms = [update.grad_norm for update in applied or updates]
    metrics |= {
        "grad_norm": sum(norms) / len(norms),
        "lr": updates[-1].lr,
        "updates": float(len(applied)),
        "updates_skipped": float(len(updates) - len(applied)),
        "step_skipped": float(not applied),
        "rows_dropped": float(len(dropped)),
        "gap_p50": gap.p50,
        "gap_p99": gap.p99,
        "gap_p50_bound": BOUNDS[precision].p50,
        "mismatch": float(mismatch is not None),
        "tokens": sums["tokens_in"],
        "flops": sums["flops"],
    }
    if updates[-1].value_lr is not None:
        metrics["value_lr"] = updates[-1].value_lr
        metrics["updates_value_only"] = float(sum(update.value_only for update in applied))
    if updates[-1].entropy_coef is not None:
        metrics["entropy_coef"] = updates[-1].entropy_coef
    seconds = _together([update.seconds for update in updates], sum)
    total_s = sum(seconds.values())
    return StepResult(
        applied=bool(applied),
        metrics=metrics,
        dropped=tuple(dropped),
        mismatch=mismatch,
        policy_moved=any(not update.value_only for update in applied),
        speed=seconds | {"tokens_per_second": sums["tokens_in"] / max(total_s, 1e-9)},
    )


def _together(each: Sequence[Mapping[str, float]], how: Callable[..., float]) -> dict[str, float]:
    return {name: how(one[name] for one in each) for name in each[0]}


def _gap(metrics: Mapping[str, float], sums: Mapping[str, float]) -> LogprobGap:
    counts = [sums[f"{GAP_HISTOGRAM}_{number}"] for number in range(BINS)]
    return LogprobGap(
        tokens=int(metrics["gap_tokens"]),
        mean=metrics["gap_mean"],
        p50=binned_quantile(counts, 0.5),
        p99=min(binned_quantile(counts, 0.99), metrics["gap_max"]),
        max=metrics["gap_max"],
    )


def _mismatch(gap: LogprobGap, precision: Precision) -> str | None:
    bounds = BOUNDS[precision]
    if gap.within(bounds):
        return None
    return (
        f"serving and training engine differ by {gap.describe(bounds)} over {gap.tokens} tokens of"
        f" the current version, more than {precision} rounds: are the served weights, the"
        " tokenizer and the sampling parameters (temperature, top-p) the trainer's?"
    )
