"""Where the seconds of a rollout went: its time from the opening to the commit of its step, cut
into stages whose sum is the whole.

A moment in which k calls ran is shared by them, 1/k each: parallel calls are not counted twice. One
in which none ran belongs to whatever the rollout waited for. What nobody measured is `unknown`,
never zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tracegrad.events import CALL_STAGES
from tracegrad.store.read.rollout_moments import RolloutMoments, TurnMoment

# Stage -> what it is, in the order in which they are shown.
STAGES: Mapping[str, str] = {
    "sandbox": "the runner's was waited for, and started",
    "setup": "until the first call: sandbox, agent",
    "proxy": "the proxy's own work",
    "gate": "weights were pushed",
    "queue": "no engine took the call",
    "engine_queue": "the engine worked on others",
    "prefill": "until the first token",
    "decode": "first token to last",
    "inference": "both, of answers in one piece",
    "commit": "turns were written to the store",
    "tools": "spans of tools, while no call ran",
    "between": "the agent, or tools without spans",
    "reward": "last call to the reward that counts",
    "waiting": "until a step leased it",
    "training": "until its step was committed",
    "unknown": "calls without timing",
}
_OF_CALLS = ("proxy", "gate", "queue", "engine_queue", "prefill", "decode", "commit")
_OWN_WORK = frozenset({"prepare", "encode", "finish"})
_KNOWN = frozenset(CALL_STAGES)


@dataclass(frozen=True, slots=True)
class TurnTime:
    """A call. Seconds: `begins_s` and `ends_s` since the rollout's beginning, with its commit where
    that is known; `seconds` by stage, all its own; empty where they are not known. `held_s`: of the
    engine's time, how long weights were being pushed."""

    turn_id: str
    begins_s: float
    ends_s: float
    seconds: Mapping[str, float]
    held_s: float = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self.seconds)

    @property
    def commit_is_known(self) -> bool:
        return "commit" in self.seconds

    @property
    def hides_engine_queue(self) -> bool:
        """Whether what it waited inside the engine is a part of its prefill or inference."""
        seconds = self.seconds
        return "engine_queue" not in seconds and ("prefill" in seconds or "inference" in seconds)


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """`stages` has those that there were, in the order of `STAGES`, and sums up to `whole_s`."""

    rollout_id: str
    began_at: float  # seconds since the epoch
    whole_s: float
    stages: Mapping[str, float]
    turns: Sequence[TurnTime]  # in order of capture

    @property
    def overlap_s(self) -> float:
        """The seconds of calls beyond those in which any ran."""
        spans = sorted((turn.begins_s, turn.ends_s) for turn in self.turns)
        covered, until = 0.0, -math.inf
        for begin, end in spans:
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        return max(0.0, sum(end - begin for begin, end in spans) - covered)


class StageStatistics(NamedTuple):
    """Of the rollouts that have the stage: seconds. `share`: of the time of all rollouts."""

    stage: str
    share: float
    mean_s: float
    p95_s: float
    rollouts: int


class _Segment(NamedTuple):
    stage: str
    begin: float
    end: float


def time_of(moments: RolloutMoments) -> RolloutTime:
    commits: dict[str, float] = {}
    for turn in moments.turns:
        commits |= (turn.timing or {}).get("commits") or {}
    laid = [_segments(turn, commits.get(turn.turn_id)) for turn in moments.turns]
    began_at = min([moments.opened_at, *(each[0].begin for each in laid)])
    laid = [[_since(began_at, segment) for segment in segments] for segments in laid]
    tools = [(begin - began_at, end - began_at) for begin, end in moments.tools]
    background = [*_with_tools(_background(moments, laid, began_at), tools)]
    stages = _share_out([segment for each in laid for segment in each], background)
    _add_measured_zeros(stages, moments, laid)
    turns = [_turn_time(turn, segments) for turn, segments in zip(moments.turns, laid, strict=True)]
    ends = [segment.end for segment in background] + [turn.ends_s for turn in turns]
    return RolloutTime(
        moments.rollout_id,
        began_at,
        max(ends, default=0.0),
        {stage: stages[stage] for stage in STAGES if stage in stages},
        turns,
    )


def stage_statistics(times: Sequence[RolloutTime]) -> list[StageStatistics]:
    """In the order of `STAGES`, those that any rollout has. The 95th percentile is that of the
    nearest rank."""
    whole = math.fsum(time.whole_s for time in times)
    found = []
    for stage in STAGES:
        seconds = sorted(time.stages[stage] for time in times if stage in time.stages)
        if not seconds:
            continue
        total = math.fsum(seconds)
        p95 = seconds[math.ceil(0.95 * len(seconds)) - 1]
        share = total / whole if whole else 0.0
        found.append(StageStatistics(stage, share, total / len(seconds), p95, len(seconds)))
    return found


def _segments(turn: TurnMoment, commit_s: float | None) -> list[_Segment]:
    """A call as stages one after the other; one point where they are not known."""
    stages = [
        (stage, float(seconds))
        for stage, seconds in (turn.timing or {}).items()
        if stage in _KNOWN and seconds >= 0
    ]
    if not stages:
        return [_Segment("unknown", turn.created_at, turn.created_at)]
    at = turn.created_at
    if not turn.from_span:
        at -= math.fsum(seconds for _, seconds in stages)
    found = []
    if commit_s is not None:
        stages.append(("commit", commit_s))
    for stage, seconds in stages:
        found.append(_Segment("proxy" if stage in _OWN_WORK else stage, at, at + seconds))
        at += seconds
    return found


def _since(began_at: float, segment: _Segment) -> _Segment:
    return _Segment(segment.stage, segment.begin - began_at, segment.end - began_at)


def _turn_time(turn: TurnMoment, segments: Sequence[_Segment]) -> TurnTime:
    seconds: dict[str, float] = {}
    for stage, begin, end in segments:
        if stage != "unknown":
            seconds[stage] = seconds.get(stage, 0.0) + end - begin
    held_s = float((turn.timing or {}).get("held") or 0.0)
    return TurnTime(turn.turn_id, segments[0].begin, segments[-1].end, seconds, held_s)


def _background(
    moments: RolloutMoments, laid: Sequence[Sequence[_Segment]], began_at: float
) -> Iterator[_Segment]:
    """What the time is that no call has, piece by piece without gaps, from 0 to the end."""
    at = 0.0

    def until(moment: float | None, stage: str) -> Iterator[_Segment]:
        nonlocal at
        if moment is not None and moment > at:
            yield _Segment(stage, at, moment)
            at = moment

    # Of a call without timing one end is known: what is before the other one may be its own.
    pairs = zip(moments.turns, laid, strict=True)
    calls = sorted(pairs, key=lambda pair: pair[1][0].begin)
    if moments.sandbox_until is not None:
        yield from until(moments.sandbox_until - began_at, "sandbox")
    stage = "setup"
    for turn, segments in calls:
        untimed = segments[0].stage == "unknown"
        yield from until(segments[0].begin, "unknown" if untimed and not turn.from_span else stage)
        stage = "unknown" if untimed and turn.from_span else "between"
        yield from until(segments[-1].end, stage)  # where its call is, and no background shows
    rewarded, finished, leased, consumed = (
        None if moment is None else moment - began_at
        for moment in (
            moments.rewarded_at,
            moments.finished_at,
            moments.leased_at,
            moments.consumed_at,
        )
    )
    lost = stage == "unknown"
    if moments.scored_from is not None:
        yield from until(moments.scored_from - began_at, stage)
    yield from until(rewarded, "unknown" if lost else "reward")
    yield from until(finished, "unknown" if lost else "between")
    yield from until(leased, "waiting")
    # A copy of a store has no leases: the wait and the step are not told apart.
    yield from until(consumed, "unknown" if leased is None else "training")


def _with_tools(
    background: Iterable[_Segment], tools: Sequence[tuple[float, float]]
) -> Iterator[_Segment]:
    """What is `between` is cut where tools ran, one or several."""
    ran = _union(tools)
    for stage, begin, end in background:
        if stage == "between":
            for first, last in ran:
                if last <= begin or first >= end:
                    continue
                if first > begin:
                    yield _Segment("between", begin, first)
                yield _Segment("tools", max(begin, first), min(end, last))
                begin = min(end, last)
        if end > begin:
            yield _Segment(stage, begin, end)


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """In order, none overlapping the next one."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


def _share_out(calls: Sequence[_Segment], background: Sequence[_Segment]) -> dict[str, float]:
    """Seconds by stage: each moment once."""
    changes: list[tuple[float, int, str]] = []
    for stage, begin, end in calls:
        if end > begin:
            changes += [(begin, 1, stage), (end, -1, stage)]
    cuts = sorted({at for at, _, _ in changes} | {s.begin for s in background}
                  | {s.end for s in background})  # fmt: skip
    changes.sort(key=lambda change: change[0])
    running: Counter[str] = Counter()
    found: dict[str, float] = {}
    next_change = piece = 0
    for begin, end in pairwise(cuts):
        while next_change < len(changes) and changes[next_change][0] <= begin:
            _, step, stage = changes[next_change]
            running[stage] += step
            next_change += 1
        while piece < len(background) and background[piece].end <= begin:
            piece += 1
        active = running.total()
        if active:
            for stage, count in running.items():
                if count:
                    found[stage] = found.get(stage, 0.0) + (end - begin) * count / active
        elif piece < len(background):
            stage = background[piece].stage
            found[stage] = found.get(stage, 0.0) + end - begin
    return found


def _add_measured_zeros(
    stages: dict[str, float], moments: RolloutMoments, laid: Sequence[Sequence[_Segment]]
) -> None:
    """Stages that there were and that took no time count in means; those nobody knows do not."""
    measured = {segment.stage for segments in laid for segment in segments} - {"unknown"}
    stages |= {stage: stages.get(stage, 0.0) for stage in measured & set(_OF_CALLS)}
    whole = "unknown" not in stages
    reached = {
        "setup": whole and bool(laid),
        "tools": whole and bool(moments.tools),
        "between": whole and bool(laid),
        "reward": whole and moments.rewarded_at is not None,
        "waiting": moments.leased_at is not None,
        "training": moments.leased_at is not None and moments.consumed_at is not None,
    }
    for stage, there in reached.items():
        if there:
            stages.setdefault(stage, 0.0)
