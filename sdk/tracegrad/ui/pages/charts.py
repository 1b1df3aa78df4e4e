"""The charts of training: which metrics each shows, and their numbers, for scripts and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tracegrad.events import Json
from tracegrad.inspect.display_text import metric_text
from tracegrad.inspect.metric_points import finite_number, has_gap, push_seconds
from tracegrad.store import PolicyVersion, StepHistory, StepRecord, Store
from tracegrad.store.read.versions import outcomes_of_versions, pushes_of_versions

# Of more steps every second, third, … is read and drawn: a chart is some 500 pixels wide.
MOST_POINTS = 500
# Series of a chart; of more the smallest are one.
MOST_SERIES = 8
# Of held-out rollouts, by the version that a step's weights became.
_SUCCESS = "evaluated/mean"


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines`: metrics, each with what it is called. `family`: all metrics that begin so."""

    name: str
    title: str
    unit: str
    lines: tuple[tuple[str, str], ...] = ()
    family: str | None = None

    @property
    def stacked(self) -> bool:
        """The parts of a family add up."""
        return self.family is not None


CHARTS = (
    Chart(
        "reward",
        "Reward",
        "reward",
        (("reward_mean", "mean of the batch"), (_SUCCESS, "held-out, when evaluated")),
    ),
    Chart("kl", "KL, serving to training engine", "nats", (("k1", "k1"), ("k3", "k3"))),
    Chart("policy", "KL of a step's own move", "nats", (("policy_k3", "k3"),)),
    Chart(
        "reference",
        "KL to the reference",
        "nats",
        (("kl_reference_k1", "k1"), ("kl_reference", "k3")),
    ),
    Chart("entropy", "Entropy", "nats", (("entropy", "of the policy"),)),
    Chart("gradient", "Gradient norm", "norm", (("grad_norm", "before clipping"),)),
    Chart(
        "staleness",
        "Staleness",
        "versions",
        (("staleness_mean", "mean"), ("staleness_max", "largest")),
    ),
    Chart("lags", "Tokens by lag", "share", family="lag_share_"),
    Chart("ess", "Effective sample size", "share", (("ess", "of the tokens"),)),
    Chart("clip", "Turns that were clipped", "share", (("clipped_turn_share", "of the turns"),)),
    Chart(
        "gap",
        "Served against trained",
        "nats",
        (("gap_mean", "mean gap"), ("gap_p50", "median"), ("gap_p99", "99 %")),
    ),
    Chart("seconds", "Where the time went", "s", family="seconds/"),
    Chart(
        "push",
        "Weight pushes",
        "s",
        (("push/seconds", "push"), ("push/paused_s", "no token"), ("push/held_s", "calls held")),
    ),
)

_FAMILIES = tuple(chart.family for chart in CHARTS if chart.family is not None)
_WANTED = frozenset(
    {metric for chart in CHARTS for metric, _ in chart.lines} | {"gap_max", "gap_tokens"}
)


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """A number a step, None where it has none. `last`, `least` and `greatest` are texts."""

    label: str
    values: list[float | None]
    last: str
    least: str
    greatest: str


@dataclass(frozen=True, slots=True)
class DrawnChart:
    """No series: there is nothing to draw."""

    chart: Chart
    series: list[ChartSeries]


@dataclass(frozen=True, slots=True)
class Drawn:
    """`every`: of how many steps one is drawn, beside the last one."""

    steps: list[int]
    every: int
    charts: list[DrawnChart]

    def as_json(self) -> Json:
        return {
            "steps": self.steps,
            "every": self.every,
            "charts": {
                one.chart.name: {
                    "unit": one.chart.unit,
                    "stacked": one.chart.stacked,
                    "series": [
                        {
                            "label": each.label,
                            "values": each.values,
                            "texts": [each.last, each.least, each.greatest],
                        }
                        for each in one.series
                    ],
                }
                for one in self.charts
            },
        }


def draw_charts(store: Store, steps: int) -> Drawn:
    """Of the last `steps` steps."""
    history = StepHistory(store)
    numbers = history.numbers(steps)
    every = -(-len(numbers) // MOST_POINTS) or 1
    # By their numbers, so that the same steps are drawn again when there is one more.
    kept = [n for n in numbers if n % every == 0 or n == numbers[-1]] if every > 1 else numbers
    records = history.of_numbers(kept)
    points = _points(store, records)
    charts = [DrawnChart(chart, _series(chart, points)) for chart in CHARTS]
    return Drawn([one.step for one in records], every, charts)


def _points(store: Store, records: Sequence[StepRecord]) -> list[dict[str, float]]:
    """The finite numbers of each step, and of the version that it became."""
    versions = [one.version for one in records]
    with store.reading() as connection:
        pushes = pushes_of_versions(connection, versions)
        evaluated = outcomes_of_versions(connection, versions, "evaluated")
    found = []
    for record in records:
        values = step_numbers(record)
        if (push := pushes.get(record.version)) is not None:
            values |= finite_numbers(_push_numbers(push))
        if (evaluation := evaluated.get(record.version)) is not None:
            values |= _success(evaluation)
        found.append(values)
    return found


def step_numbers(record: StepRecord) -> dict[str, float]:
    """Those that charts show: a step has a hundred, and a page hundreds of steps."""
    metrics = record.metrics
    chosen: dict[str, Any] = {name: metrics[name] for name in _drawn_names(tuple(metrics))}
    for prefix in _FAMILIES:
        table = metrics.get(prefix[:-1]) if prefix.endswith("/") else None
        if isinstance(table, Mapping):
            chosen |= {prefix + name: value for name, value in table.items()}
    values = finite_numbers(chosen)
    if not has_gap(values):  # a gap of no tokens means nothing
        values = {name: value for name, value in values.items() if not name.startswith("gap_")}
    return values


@lru_cache(maxsize=64)  # most steps have the same names
def _drawn_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in _WANTED or name.startswith(_FAMILIES))


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: finite_number(value) for name, value in values.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _push_numbers(push: PolicyVersion) -> dict[str, Any]:
    """Those of `push_point` that charts show."""
    return {
        "push/seconds": push_seconds(push),
        "push/paused_s": push.detail.get("paused_s"),
        "push/held_s": push.detail.get("held_s"),
    }


def _success(evaluation: PolicyVersion) -> dict[str, float]:
    return finite_numbers({_SUCCESS: evaluation.detail.get("mean_candidate")})


def _series(chart: Chart, points: Sequence[Mapping[str, float]]) -> list[ChartSeries]:
    """Those that have a number at some step."""
    columns = [
        (label, [point.get(metric) for point in points]) for metric, label in chart.lines
    ] + (_family(chart.family, points) if chart.family is not None else [])
    return [
        _made(label, values, chart.unit)
        for label, values in columns
        if any(value is not None for value in values)
    ]


def _family(
    prefix: str, points: Sequence[Mapping[str, float]]
) -> list[tuple[str, list[float | None]]]:
    """One a name, those with the largest sums; what the others add up to is the last."""
    names = dict.fromkeys(name for point in points for name in point)
    family = [name for name in names if name.startswith(prefix)]
    sums = {name: sum(point.get(name, 0.0) for point in points) for name in family}
    by_size = sorted(sums, key=lambda name: -sums[name])
    few = len(by_size) <= MOST_SERIES
    shown = sorted(by_size if few else by_size[: MOST_SERIES - 1])
    rest = [] if few else by_size[MOST_SERIES - 1 :]
    found = [(name.removeprefix(prefix), [p.get(name) for p in points]) for name in shown]
    return found + ([("others", [_sum(p, rest) for p in points])] if rest else [])


def _sum(point: Mapping[str, float], names: Iterable[str]) -> float | None:
    known = [point[name] for name in names if name in point]
    return finite_number(sum(known)) if known else None


def _made(label: str, values: list[float | None], unit: str) -> ChartSeries:
    known = [value for value in values if value is not None]
    texts = (metric_text(value, unit) for value in (known[-1], min(known), max(known)))
    return ChartSeries(label, values, *texts)
