"""What a soak must show, each with its number and its bound. No bound is a machine's speed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from bench.soak.dialects import DIALECTS
from bench.soak.equal_lengths import of_equal_lengths
from bench.soak.run import Outcome
from bench.soak.sampler import OURS, PROXY, Sample, Usage
from bench.soak.traffic import Call
from bench.soak.trends import Interval, Series, Trend, compare, mean, quantile, trend
from bench.tables import number

# A role's own memory may grow by so much of itself in the last two thirds. Its own is what belongs
# to no file: workers tell each other what they know in rings of a fixed size, which they share and
# which take tens of minutes to be written once.
MEMORY_SHARE = 0.02
# ... and its descriptors and threads by so many and so much: a connection takes a descriptor.
HANDLES, HANDLES_SHARE = 2.0, 0.05
# Last third over middle third: of one dialect, where 15 figures are looked at, with a confidence
# of 99 %, and of all calls together, which must be known well enough to say something.
DRIFT, CONFIDENCE = 1.15, 0.99
POOLED = 1.5
CPU_DRIFT = 1.25
REWARD_LOSS = 0.02
RISE = 0.3
DISK_SHARE = 0.1
# A shorter window shows caches that fill and allocators that settle.
JUDGED_S = 600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`met` None: the run was too short to say."""

    what: str
    wanted: str
    measured: str
    met: bool | None


class Thirds:
    """A soak's time in three: what comes in the first is warm-up."""

    def __init__(self, found: Outcome) -> None:
        self.found = found
        third = (found.ended - found.began) / 3
        self.edges = tuple(found.began + third * number for number in range(4))

    @property
    def window_s(self) -> float:
        """Of the two that are judged."""
        return self.edges[3] - self.edges[1]

    @property
    def are_judged(self) -> bool:
        return self.window_s >= JUDGED_S

    @cached_property
    def settled(self) -> list[Sample]:
        return [one for one in self.found.samples if self.edges[1] <= one.at <= self.edges[3]]

    def of(self, third: int, at: float) -> bool:
        """`third`: 0, 1 or 2."""
        return self.edges[third] <= at < self.edges[third + 1]

    def samples(self, third: int) -> list[Sample]:
        return [one for one in self.found.samples if self.of(third, one.at)]

    def usage(self, role: str, field: Callable[[Usage], float]) -> Trend | None:
        """Of the two thirds that are judged."""
        some = [one for one in self.settled if role in one.roles]
        return trend([one.at for one in some], [field(one.roles[role]) for one in some])

    def roles(self) -> list[str]:
        return list(dict.fromkeys(role for one in self.settled for role in one.roles))

    def calls(self, third: int, dialect: str | None = None) -> list[Call]:
        """Good ones, answered whole."""
        return [
            call
            for call in self.found.calls
            if call.error is None
            and call.answer_id is not None
            and self.of(third, call.at)
            and dialect in (None, call.dialect)
        ]

    def drift(self, calls: Callable[[int], Sequence[Call]], what: str) -> Interval | None:
        """`what`: `p50` or `p95`, of replies of equal lengths, or `first`: the median time to the
        first words."""
        middle, last = calls(1), calls(2)
        if what != "first":
            middle, last = of_equal_lengths(middle, last)

        def series(some: Sequence[Call]) -> Series:
            times = [(call.at, call.first_s if what == "first" else call.seconds) for call in some]
            known = [(at, value) for at, value in times if value is not None]
            return Series([at for at, _ in known], [value for _, value in known])

        return compare(
            series(middle),
            series(last),
            quantile(0.95 if what == "p95" else 0.5),
            operator.truediv,
            confidence=CONFIDENCE,
        )

    def rewards(self, third: int) -> list[float]:
        return [one.reward for one in self.found.rewards if self.of(third, one.finished_at)]

    def proxy_cpu_ms(self, third: int) -> float | None:
        """Of its processes, a turn."""
        some = [one for one in self.samples(third) if "turns_committed_total" in one.metrics]
        if len(some) < 2:
            return None
        first, last = some[0], some[-1]
        name = "turns_committed_total"
        turns = last.metrics[name] - first.metrics[name]
        return 1e3 * (_proxy_cpu(last) - _proxy_cpu(first)) / turns if turns else None


def _proxy_cpu(sample: Sample) -> float:
    return sum(sample.roles[role].cpu_s for role in PROXY if role in sample.roles)


def verdicts(found: Outcome) -> list[Verdict]:
    thirds = Thirds(found)
    return [
        *_memory(thirds),
        _handles(thirds, "file descriptors", lambda usage: usage.fds),
        _handles(thirds, "threads", lambda usage: usage.threads),
        _disk(thirds),
        *_latency(thirds),
        _cpu(thirds),
        *_reward(thirds),
        *_failures(found),
    ]


def _memory(thirds: Thirds) -> Iterable[Verdict]:
    for role in thirds.roles():
        if role not in OURS:
            continue
        own = thirds.usage(role, lambda usage: usage.anonymous_mib)
        yield Verdict(
            f"own memory of {role}",
            f"grows by less than {MEMORY_SHARE:.0%}, or not surely",
            "" if own is None else f"{percent(own)} of {number(own.level)} MiB",
            None
            if own is None or not thirds.are_judged
            else not own.is_growing(MEMORY_SHARE * own.level),
        )


def percent(found: Trend) -> str:
    growth = found.growth
    value, low, high = (
        100 * each / found.level for each in (growth.value, growth.low, growth.high)
    )
    return f"{value:+.2f} % ({low:+.2f} to {high:+.2f})"


def _handles(thirds: Thirds, name: str, field: Callable[[Usage], float]) -> Verdict:
    trends = {
        role: found
        for role in thirds.roles()
        if role in OURS and (found := thirds.usage(role, field)) is not None
    }
    growing = [
        role for role, one in trends.items() if one.is_growing(HANDLES + HANDLES_SHARE * one.level)
    ]
    most = max(trends, key=lambda role: trends[role].growth.value, default="")
    return Verdict(
        f"{name} of each role",
        f"grow by less than {HANDLES:.0f} and {HANDLES_SHARE:.0%}, or not surely",
        f"{trends[most].growth.value:+.1f} ({most})" if most else "",
        not growing if trends and thirds.are_judged else None,
    )


def _disk(thirds: Thirds) -> Verdict:
    def most(third: int) -> float:
        names = ("checkpoints", "versions")
        sizes = [
            sum(one.disk_mib.get(name, 0.0) for name in names) for one in thirds.samples(third)
        ]
        return max(sizes, default=0.0)

    middle, last = most(1), most(2)
    return Verdict(
        "disk of checkpoints and versions, at most",
        f"last third within {DISK_SHARE:.0%} of the middle third",
        f"{number(middle)} MiB, then {number(last)} MiB, {len(thirds.found.steps)} steps",
        last <= (1 + DISK_SHARE) * middle if thirds.are_judged else None,
    )


DRIFTS = {"p50": "median", "p95": "95th percentile", "first": "median time to first words"}


def _latency(thirds: Thirds) -> Iterable[Verdict]:
    for what, named in DRIFTS.items():
        found: dict[str, Interval] = {}
        for dialect in DIALECTS:
            name = dialect.name
            drift = thirds.drift(partial(thirds.calls, dialect=name), what)
            if drift is not None:
                found[name] = drift
        worst = max(found, key=lambda name: found[name].low, default="")
        yield Verdict(
            f"latency by dialect, {named}",
            f"no dialect surely above {DRIFT} times",
            f"{worst} {times(found[worst])}" if worst else "",
            found[worst].low <= DRIFT if worst and thirds.are_judged else None,
        )
    pooled = thirds.drift(thirds.calls, "p50")
    yield Verdict(
        "latency of all, median",
        f"surely below {POOLED} times",
        times(pooled),
        pooled.high < POOLED if pooled and thirds.are_judged else None,
    )


def times(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _cpu(thirds: Thirds) -> Verdict:
    middle, last = thirds.proxy_cpu_ms(1), thirds.proxy_cpu_ms(2)
    known = middle is not None and last is not None
    return Verdict(
        "the proxy's CPU time a turn",
        f"last third below {CPU_DRIFT} times the middle third",
        f"{number(middle)} ms, then {number(last)} ms" if known else "",
        last < CPU_DRIFT * middle
        if middle is not None and last is not None and thirds.are_judged
        else None,
    )


def _reward(thirds: Thirds) -> Iterable[Verdict]:
    found = thirds.found

    def series(third: int) -> Series:
        some = [one for one in found.rewards if thirds.of(third, one.finished_at)]
        return Series([one.finished_at for one in some], [one.reward for one in some])

    change = compare(series(1), series(2), mean, operator.sub)
    said = (
        "" if change is None else f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
    )
    yield Verdict(
        "mean reward in training, last third less middle third",
        f"not surely below {-REWARD_LOSS}",
        said,
        change.high >= -REWARD_LOSS if change is not None and thirds.are_judged else None,
    )
    yield Verdict(
        "greedy success on held-out tasks",
        f"rises by {RISE}",
        f"{found.before:.2f} to {found.after:.2f}",
        found.after - found.before >= RISE if thirds.are_judged else None,
    )


def _failures(found: Outcome) -> Iterable[Verdict]:
    errors = Counter(f"{call.dialect}: {call.error}" for call in found.calls if call.error)
    made = len(found.calls)
    said = f"none of {made:,}" if not errors else f"{errors.total()} of {made:,}: {_some(errors)}"
    yield Verdict("background calls that failed", "none", said, not errors)
    failed = found.agents.failed
    made = len(found.agents.answered) + failed.total()
    said = f"none of {made:,}" if not failed else f"{failed.total()} of {made:,}: {_some(failed)}"
    yield Verdict("agents' calls that failed", "none", said, not failed)
    yield Verdict("answers whose turn is not stored", "none", str(found.missing), not found.missing)
    numbers = [step.step for step in found.steps]
    right = bool(numbers) and numbers == list(range(1, len(numbers) + 1))
    yield Verdict("steps in order", "yes", f"{len(numbers)} steps", right)
    left = len(found.left)
    said = "none" if not left else f"{left}, such as {found.left[0]}"
    yield Verdict("processes left after SIGTERM", "none", said, not left)
    lines = found.complaints
    said = "none" if not lines else f"{len(lines)}, such as {lines[0]}"
    yield Verdict("errors in the logs", "none", said, not lines)


def _some(errors: Counter[str]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in errors.most_common(3))
