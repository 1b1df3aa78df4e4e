"""A step as a line of a table: the same columns on a terminal and on the web page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tracegrad.inspect.metric_points import finite_number, has_gap, trained_turns

_LONGEST = 20  # characters of what is no number


class StepColumn(NamedTuple):
    """`how`: the format of its cells; "": in at most four characters. `meaning` None: the heading
    says it."""

    heading: str
    metric: str
    how: str
    meaning: str | None

    def cell(self, metrics: Mapping[str, Any]) -> str:
        value = self._value(metrics)
        number = finite_number(value)
        if number is None:
            return "–" if value is None else str(value)[:_LONGEST]
        return format(number, self.how) if self.how else _short(number)

    def _value(self, metrics: Mapping[str, Any]) -> Any:
        """None: it has no meaning for this step."""
        try:
            if self.metric == "turns_trained":
                return trained_turns(metrics)
            if self.metric == "gap_mean" and not has_gap(metrics):
                return None
        except (TypeError, ValueError, OverflowError):  # what was counted is no number
            return None
        return metrics.get(self.metric)


# The most important first.
_COLUMNS = (
    StepColumn("reward", "reward_mean", ".3f", None),
    StepColumn(
        "spread",
        "group_spread",
        ".2f",
        "deviation of the rewards within a group; 0 teaches nothing",
    ),
    StepColumn("turns", "turns_trained", ".0f", None),
    StepColumn("loss", "loss", "+.3f", None),
    StepColumn("grad", "grad_norm", ".2g", "norm of the gradient before clipping"),
    StepColumn(
        "ent.",
        "entropy",
        ".2f",
        "entropy of the policy, nats a token; near 0 it has stopped to try",
    ),
    StepColumn(
        "k3",
        "k3",
        ".0e",
        "KL of the policy that sampled to the one before the step, nats a token",
    ),
    StepColumn(
        "ess",
        "ess",
        ".2f",
        "effective sample size: share of tokens left by that difference; 1 is all",
    ),
    StepColumn("clip", "clipped_turn_share", ".0%", "turns with a token whose ratio was clipped"),
    StepColumn(
        "lag",
        "staleness_mean",
        ".1f",
        "versions between the policy that sampled and this one",
    ),
    StepColumn(
        "gap",
        "gap_mean",
        ".0e",
        "mean difference of served and trained log-probabilities, nats",
    ),
    StepColumn("tok/s", "tokens_per_second", "", None),
)


def columns_of(steps: Sequence[Mapping[str, Any]]) -> list[StepColumn]:
    """Those of which some of these steps' metrics have something."""
    return [column for column in _COLUMNS if any(column.metric in metrics for metrics in steps)]


def _short(value: float) -> str:
    if value < 9999.5:
        return f"{value:.0f}"
    for size, unit in ((1e3, "k"), (1e6, "M")):
        if value < 999.5 * size:
            return f"{value / size:.{int(value < 9.95 * size)}f}{unit}"
    return f"{value / 1e9:.0f}G"
