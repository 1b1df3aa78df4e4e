"""What a run of `tracegrad.run` came to, gathered from its attempts while it goes on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracegrad.events import Outcome
from tracegrad.pass_at_k import mean_pass_at_k
from tracegrad.runner.attempt import Attempt
from tracegrad.runner.driver import RunObserver
from tracegrad.runner.learning_curve import CurvePoint
from tracegrad.runner.run_record import RunRecord
from tracegrad.runner.scheduler import GroupKey, Ticket

_RECENT = 256  # rollouts of the mean that is said
_MOST_FAILURES = 20  # kinds of them that are said


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out attempts. `version`: the policy's that was served when it began; None: unknown.
    `pass_at_k`: with `k` attempts; None: no task has as many with a reward. `reward`: the mean.
    `rollouts`: that have one, of `asked`."""

    version: int | None
    at_s: float
    pass_at_1: float
    pass_at_k: float | None
    k: int
    reward: float
    rollouts: int
    asked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run came to, with its part before an interruption but for `outcomes`, `replaced`,
    `cut` and `seconds`.

    Attributes:
        evaluations: in their order: before, every `eval_every` versions, after.
        training: mean rewards of training rollouts by the version that was served when they began.
        outcomes: of training rollouts.
        replaced, cut: attempts that were made again; that their group did not need.
        groups: that have all their attempts.
        left_out: why tasks are quarantined that were not run (again), by their ids.
        ended_by: `tasks`, `steps`, `stop_at` or `patience`.
        folder: the run's; `run(..., resume=folder)` goes on with it.
        picture: the learning curve; None: matplotlib is not there, or no version is known.
    """

    evaluations: Sequence[Evaluation]
    training: Sequence[CurvePoint]
    outcomes: Mapping[Outcome, int]
    replaced: int
    cut: int
    groups: int
    left_out: Mapping[str, str]
    ended_by: str
    seconds: float
    folder: Path
    picture: Path | None


class TrainingRewards(RunObserver):
    """Training rewards by the version that was served when their attempts began."""

    def __init__(self, record: RunRecord, version: Callable[[], int | None]) -> None:
        self._record, self._version = record, version
        self._served: int | None = None  # as the record says
        self._began: dict[Ticket, int | None] = {}
        self._rewards: defaultdict[int, list[float]] = defaultdict(list)
        self._known: list[float] = []
        for one in record.past:
            self._add(one.version, one.reward)
        self._before, self._since = len(self._known), time.monotonic()

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        version = self._began[ticket] = self._version()
        if version is not None and version != self._served:
            self._served = version
            self._record.served(version)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self._add(self._began.pop(ticket, None), attempt.reward)

    def _add(self, version: int | None, reward: float | None) -> None:
        if reward is None:
            return
        self._known.append(reward)
        if version is not None:
            self._rewards[version].append(reward)

    def points(self) -> list[CurvePoint]:
        return [
            CurvePoint(version, sum(rewards) / len(rewards), len(rewards))
            for version, rewards in sorted(self._rewards.items())
        ]

    def line(self, version: int | None) -> str:
        served = "" if version is None else f"version {version}: "
        recent = self._known[-_RECENT:]
        if not recent:
            return f"{served}no training rollout has a reward"
        passed_s = max(1e-3, time.monotonic() - self._since)
        per_minute = 60 * (len(self._known) - self._before) / passed_s
        return (
            f"{served}{len(self._known)} training rollouts, {per_minute:.0f}/min, "
            f"mean reward of the last {len(recent)}: {sum(recent) / len(recent):.2f}"
        )


class FirstFailures(RunObserver):
    """Says the first of each kind: nobody else does while a run goes on."""

    def __init__(self, said: Callable[[str], object]) -> None:
        self._said = said
        self._known: set[tuple[Outcome, str]] = set()

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        outcome, reason = attempt.outcome, attempt.reason or ""
        if outcome in (Outcome.COMPLETED, Outcome.BUDGET, Outcome.ABORTED):
            return
        kind = outcome, reason.partition(":")[0]
        if kind not in self._known and len(self._known) < _MOST_FAILURES:
            self._known.add(kind)
            self._said(f"{outcome} at {attempt.task_id:.60}, {attempt.rollout_id}: {reason:.300}")


class EvaluationRewards(RunObserver):
    """Of an evaluation, by task."""

    def __init__(self) -> None:
        self._rewards: defaultdict[GroupKey, list[float]] = defaultdict(list)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        if attempt.reward is not None:
            self._rewards[ticket.group].append(attempt.reward)

    def evaluation(self, version: int | None, at_s: float, k: int, tasks: int) -> Evaluation | None:
        """None: nothing has a reward."""
        known = [reward for rewards in self._rewards.values() for reward in rewards]
        if not known:
            return None
        return Evaluation(
            version=version,
            at_s=at_s,
            pass_at_1=mean_pass_at_k(self._rewards.values(), 1) or 0.0,
            pass_at_k=mean_pass_at_k(self._rewards.values(), k),
            k=k,
            reward=sum(known) / len(known),
            rollouts=len(known),
            asked=k * tasks,
        )


def evaluation_line(made: Evaluation) -> str:
    version = "" if made.version is None else f" at version {made.version}"
    more = ""
    if made.k > 1 and made.pass_at_k is not None:
        more = f", pass@{made.k} {made.pass_at_k:.3f}"
    missing = made.asked - made.rollouts
    unknown = f"; {missing} more have no reward" if missing else ""
    return (
        f"held-out{version}: pass@1 {made.pass_at_1:.3f}{more} of {made.rollouts} rollouts{unknown}"
    )
