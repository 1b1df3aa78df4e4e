"""Finds what is to be scored, has it scored, and writes what came of it; then the sums.

All state is in the store. A worker that is killed loses attempts, never an outcome: that is written
with the rewards that belong to it in one transaction, once (`store.write.scorings`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from tracegrad.events import Reward
from tracegrad.store import Scoring, Store, StoreUnavailable, UnknownRollout
from tracegrad.store.databases import statements
from tracegrad.store.read.rollouts import load_rewards
from tracegrad.store.read.scorings import (
    COMMITTED_LATER,
    ScoringCandidate,
    load_scorings,
    newest_reward_of_all,
    scoring_candidates,
)
from tracegrad.store.rows import chunks
from tracegrad.store.types import SCORER_SOURCE
from tracegrad_trainer.rewards.attempt import FIRST_PAUSE_S, AttemptPolicy, Attempts, RateLimit
from tracegrad_trainer.rewards.commands import CommandScorer
from tracegrad_trainer.rewards.compose import Composition, compose, composed_event, latest_parts
from tracegrad_trainer.rewards.config import RewardSettings
from tracegrad_trainer.rewards.functions import FunctionScorer
from tracegrad_trainer.rewards.judge import GroupJudge
from tracegrad_trainer.rewards.judge_groups import (
    JudgeGroup,
    TaskTexts,
    lone_rollouts,
    similar_groups,
)
from tracegrad_trainer.rewards.read_rollout import read_rollout
from tracegrad_trainer.rewards.result import FORMAT, LENGTH, Score
from tracegrad_trainer.rewards.rollout import ScoredRollout
from tracegrad_trainer.rewards.similar_tasks import SIMILAR, is_ungrouped, similar_task_id

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Rollouts whose scorings are under way or wait for a slot: their texts are in memory then.
_MOST_UNDER_WAY = 64
_STORE_AGAIN_S = 1.0

Scorer = FunctionScorer | CommandScorer | GroupJudge
# Which outcomes do not count as such: none; those that failed; all.
Again = Literal["no", "failed", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringScope:
    """Which rollouts, by the settings of training. `seed`: of the judge's order. `held_out`: tags
    of those that are never trained."""

    tags: Mapping[str, str] = field(default_factory=dict)
    group_size: int = 1
    incomplete_after_s: float = 0.0
    seed: int = 0
    held_out: Mapping[str, str] | None = None


@dataclass(slots=True)
class ScoringTotals:
    """Of outcomes that were written here, and of sums."""

    scored: int = 0
    unknown: int = 0
    failed: int = 0
    composed: int = 0


def scorer_list(settings: RewardSettings, *, seed: int = 0) -> list[Scorer]:
    """Raises ValueError: the judge has no key."""
    secret = None if settings.judge is None else settings.judge.key_variable
    timeout_s = settings.timeout_s
    found: list[Scorer] = [
        FunctionScorer(name, path, timeout_s=timeout_s, secret=secret)
        for name, path in settings.functions.items()
    ]
    for name, term in ((LENGTH, settings.length), (FORMAT, settings.format)):
        if term is not None:
            described = json.dumps({"term": name, **term.model_dump()})
            found.append(FunctionScorer(name, described, timeout_s=timeout_s, secret=secret))
    found += [
        CommandScorer(name, command, timeout_s=timeout_s, secret=secret)
        for name, command in settings.commands.items()
    ]
    if settings.judge is not None:
        found.append(GroupJudge(settings.judge, timeout_s=timeout_s, seed=seed))
    return found


class ScoringRun:
    """The scorers of these settings at work on one store. To be used as a context."""

    def __init__(
        self,
        store: Store,
        settings: RewardSettings,
        scope: ScoringScope,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`first_pause_s`: between attempts. Raises ValueError: the judge has no key."""
        self.store = store
        self.settings = settings
        self.scope = scope
        self.scorers = scorer_list(settings, seed=scope.seed)
        self._policies = {
            scorer.name: AttemptPolicy(
                settings.retries,
                RateLimit(settings.per_minute),
                asyncio.Semaphore(settings.concurrency),
                first_pause_s,
            )
            for scorer in self.scorers
        }
        self.totals = ScoringTotals()
        self._under_way: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._settled: dict[str, ScoringCandidate] = {}
        self._again: set[tuple[str, str]] = set()
        self._lone: set[str] = set()  # whose scores are not comparable with any other's now
        self._texts = TaskTexts(store, scope.held_out)
        self._rewards_seen = 0
        self._broken: BaseException | None = None  # what a task of ours died of

    async def __aenter__(self) -> ScoringRun:
        """Raises FunctionUnusable: a function cannot be imported."""
        try:
            await asyncio.gather(*(scorer.start() for scorer in self.scorers))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        tasks = [*self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for scorer in self.scorers:
            await scorer.close()

    async def look(
        self, *, rollout_ids: Collection[str] | None = None, patient: bool = True
    ) -> bool:
        """Begins what is due, as much as there is room for, and makes the sums that can be made.
        Whether there is to be another look: scorings were begun, or were under way when the store
        was read. `patient`: groups that may still be completed are waited for. Raises
        StoreError.
        """
        if self._broken is not None:
            raise self._broken
        # Their outcomes may be written after the store was read, and before that is looked at.
        busy = frozenset(self._under_way)
        found = await asyncio.to_thread(self._look_up, rollout_ids)
        if rollout_ids is None:
            for gone in self._settled.keys() - found.candidates.keys():
                del self._settled[gone]
        begun = 0
        to_judge: list[ScoringCandidate] = []
        sums: list[Reward] = []
        settled: dict[str, ScoringCandidate] = {}
        for rollout_id, history in found.changed.items():
            candidate = found.candidates[rollout_id]
            due = [
                each
                for each in self.scorers
                if (rollout_id, each.name) not in busy and self._is_due(each, candidate, history)
            ]
            for scorer in due:
                if isinstance(scorer, GroupJudge):
                    to_judge.append(candidate)
                elif self._has_room:
                    begun += 1
                    self._begin([candidate], found, scorer, self._score_one(scorer, candidate))
            if (event := self._sum(candidate, history)) is not None:
                sums.append(event)
            if not (due or any((rollout_id, each.name) in busy for each in self.scorers)):
                settled[rollout_id] = candidate
        await self._record_sums(sums)
        self._settled |= settled
        named = [each for each in to_judge if not self._is_to_be_grouped(each)]
        begun += self._begin_groups(named, found, patient=patient)
        if len(named) < len(to_judge):
            alike = [each for each in to_judge if self._is_to_be_grouped(each)]
            begun += await self._begin_similar(alike, found, patient=patient)
        return bool(begun or busy)

    async def finish(
        self, *, rollout_ids: Collection[str] | None = None, again: Again = "no"
    ) -> ScoringTotals:
        """Until nothing is left to do. Raises StoreError."""
        if again != "no":
            self._again = await asyncio.to_thread(self._asked_again, rollout_ids, again)
        while await self.look(rollout_ids=rollout_ids, patient=False):
            await self.wait()
        return self.totals

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until something that is under way ends, and there is room for as much again."""
        try:
            async with asyncio.timeout(timeout_s):
                if not self._under_way and timeout_s is not None:
                    await asyncio.sleep(timeout_s)
                first = asyncio.FIRST_COMPLETED
                while tasks := [*self._under_way.values()]:
                    await asyncio.wait(tasks, return_when=first)
                    if len(self._under_way) <= _MOST_UNDER_WAY // 2:
                        return
        except TimeoutError:
            pass

    # What is due

    def _look_up(self, rollout_ids: Collection[str] | None) -> _Found:
        with self.store.reading() as connection:
            newest = newest_reward_of_all(connection)
            candidates = {
                each.rollout_id: each
                for each in scoring_candidates(
                    connection,
                    self.scope.tags,
                    rewards_after=max(0, self._rewards_seen - COMMITTED_LATER),
                    rollout_ids=rollout_ids,
                    held_out=self.scope.held_out,
                )
            }
            # Of some that are named, the others of their groups are not looked at.
            self._lone = self._find_lone(candidates) if rollout_ids is None else set()
            changed = [
                name
                for name, each in candidates.items()
                if self._settled.get(name) != each or name in self._lone
            ]
            scorings = load_scorings(connection, changed)
            rewards = load_rewards(connection, changed)
            now = statements.server_time(connection)
        if rollout_ids is None:
            self._rewards_seen = newest
        histories = {
            name: _History(_last_of_each(scorings[name]), rewards[name]) for name in changed
        }
        return _Found(candidates, histories, now)

    def _asked_again(
        self, rollout_ids: Collection[str] | None, again: Again
    ) -> set[tuple[str, str]]:
        found = self._look_up(rollout_ids)
        return {
            (rollout_id, scorer.name)
            for rollout_id, history in found.changed.items()
            for scorer in self.scorers
            if (last := history.scorings.get(scorer.name)) is not None
            and (again == "all" or last.state == "failed")
        }

    def _is_due(self, scorer: Scorer, candidate: ScoringCandidate, history: _History) -> bool:
        key = (candidate.rollout_id, scorer.name)
        if not candidate.is_finished or candidate.is_consumed or key in self._under_way:
            return False
        if isinstance(scorer, GroupJudge) and candidate.rollout_id in self._lone:
            return True
        return key in self._again or not history.is_scored(scorer.name, candidate)

    @property
    def _judge(self) -> GroupJudge | None:
        return next((each for each in self.scorers if isinstance(each, GroupJudge)), None)

    @property
    def _groups_similar(self) -> bool:
        return self._judge is not None and self._judge.settings.groups == "similar"

    def _is_to_be_grouped(self, candidate: ScoringCandidate) -> bool:
        return self._groups_similar and is_ungrouped(candidate.task_id)

    def _find_lone(self, candidates: Mapping[str, ScoringCandidate]) -> set[str]:
        if not self._groups_similar:
            return set()
        busy = {rollout_id for rollout_id, _ in self._under_way}
        return lone_rollouts(candidates.values()) - busy

    @property
    def _has_room(self) -> bool:
        return len(self._under_way) < _MOST_UNDER_WAY

    def _begin(
        self,
        candidates: Sequence[ScoringCandidate],
        found: _Found,
        scorer: Scorer,
        work: Coroutine[Any, Any, Mapping[str, _Result]],
        task_id: str | None = None,
    ) -> None:
        """`task_id`: what they become attempts at, if they are scored."""
        keys = [(each.rollout_id, scorer.name) for each in candidates]

        async def run() -> None:
            results = await work
            await self._record(scorer, results, found, task_id)

        def ended(task: asyncio.Task[None]) -> None:
            for key in keys:
                self._under_way.pop(key, None)
            if not task.cancelled() and task.exception() is not None:
                self._broken = task.exception()

        task = asyncio.create_task(run())
        self._under_way |= dict.fromkeys(keys, task)
        self._again -= set(keys)
        task.add_done_callback(ended)

    def _begin_groups(
        self, to_judge: Sequence[ScoringCandidate], found: _Found, *, patient: bool
    ) -> int:
        """Of those that wait for the judge, as the ledger forms groups."""
        by_task: dict[str, list[ScoringCandidate]] = {}
        for each in to_judge:
            if each.task_id is not None:  # nothing to compare it with
                by_task.setdefault(each.task_id, []).append(each)
        begun = 0
        for rollouts in by_task.values():
            rollouts.sort(key=lambda each: (each.finished_at or 0.0, each.rollout_id))
            for group in chunks(rollouts, self.scope.group_size):
                ended = group[-1].finished_at or 0.0
                stale = not patient or ended < found.now - self.scope.incomplete_after_s
                whole = len(group) == self.scope.group_size
                if len(group) >= 2 and (whole or stale) and self._has_room:
                    begun += len(group)
                    judge = self._judge
                    assert judge is not None
                    self._begin(group, found, judge, self._score_group(judge, group))
        return begun

    async def _begin_similar(
        self, alike: Sequence[ScoringCandidate], found: _Found, *, patient: bool
    ) -> int:
        """Of those without a task; they become attempts at one when they were judged."""
        judge = self._judge
        assert judge is not None

        def form() -> list[JudgeGroup]:
            return similar_groups(
                self._texts.read(alike),
                judge.settings,
                size=self.scope.group_size,
                incomplete_after_s=self.scope.incomplete_after_s if patient else 0.0,
                now=found.now,
            )

        begun = 0
        for group in await asyncio.to_thread(form):
            is_due = group.smaller_in_s is not None and (not patient or group.smaller_in_s == 0)
            if is_due and self._has_room:
                begun += len(group.rollouts)
                members = [found.candidates[name] for name in group.rollouts]
                work = self._score_group(judge, members)
                self._begin(members, found, judge, work, similar_task_id(group.rollouts))
        return begun

    # Scoring

    async def _score_one(
        self, scorer: FunctionScorer | CommandScorer, candidate: ScoringCandidate
    ) -> dict[str, _Result]:
        rollout = await self._load(candidate.rollout_id)
        if rollout is None:
            return {}
        made = await self._policies[scorer.name].run(lambda n: scorer.score(rollout, n))
        return {candidate.rollout_id: _Result(self._checked(scorer, made), candidate.turns)}

    async def _score_group(
        self, judge: GroupJudge, group: Sequence[ScoringCandidate]
    ) -> dict[str, _Result]:
        loaded = [await self._load(each.rollout_id) for each in group]
        rollouts = [each for each in loaded if each is not None]
        if len(rollouts) < len(group):
            return {}  # one was removed: the others form a group with others
        made = await self._policies[judge.name].run(lambda n: judge.score(rollouts, n))
        scores: Sequence[float | None] = made.result or [None] * len(group)
        return {
            each.rollout_id: _Result(
                Attempts(
                    None if score is None else Score({judge.name: score}, {}),
                    made.error,
                    made.count,
                    made.seconds,
                ),
                each.turns,
            )
            for each, score in zip(group, scores, strict=True)
        }

    async def _load(self, rollout_id: str) -> ScoredRollout | None:
        """None: it was removed."""

        def load() -> ScoredRollout | None:
            try:
                return read_rollout(self.store.rollout(rollout_id))
            except UnknownRollout:
                return None

        return await self._stored(load)

    def _checked(self, scorer: Scorer, made: Attempts[Score]) -> Attempts[Score]:
        """A part of another scorer's name would count in its place."""
        others = set(self.settings.scorers) - {scorer.name}
        taken = sorted(others & (made.result.parts.keys() if made.result else set()))
        if not taken:
            return made
        error = f"{scorer.name} gave a part named {taken[0]!r}, which is another scorer's name"
        return replace(made, result=None, error=error)

    async def _record(
        self,
        scorer: Scorer,
        results: Mapping[str, _Result],
        found: _Found,
        task_id: str | None,
    ) -> None:
        outcomes: list[Scoring] = []
        rewards: list[Reward] = []
        for rollout_id, result in results.items():
            history = found.changed[rollout_id]
            outcome = _outcome(scorer, rollout_id, result, history)
            outcomes.append(outcome)
            rewards += _rewards(scorer, outcome, result, history)
        if not outcomes:
            return
        if any(outcome.state == "failed" for outcome in outcomes):
            task_id = None  # they were not compared
        record = partial(
            self.store.record_scorings, outcomes, rewards, task_id=task_id, replaces=SIMILAR
        )
        if not await self._stored(record):
            return
        for outcome in outcomes:
            if outcome.state == "failed":
                self.totals.failed += 1
                logger.warning("rollout %s: %s", outcome.rollout_id, outcome.error)
            elif outcome.state == "unknown":
                self.totals.unknown += 1
            else:
                self.totals.scored += 1

    def _sum(self, candidate: ScoringCandidate, history: _History) -> Reward | None:
        """What is to be said of it now; None: nothing."""
        lacking = [
            scorer.name for scorer in self.scorers if not history.is_scored(scorer.name, candidate)
        ]
        if lacking and candidate.is_consumed:
            return None  # it is not scored any more: what was made of it stays
        if not candidate.is_finished and not candidate.is_consumed:
            made = Composition(None, why="unknown: the rollout goes on")
        elif lacking:
            made = Composition(None, why=f"unknown: {', '.join(lacking)} did not end with it yet")
        else:
            made = compose(self.settings, latest_parts(history.rewards), history.scorings)
        return composed_event(candidate.rollout_id, made, history.rewards)

    async def _record_sums(self, sums: Sequence[Reward]) -> None:
        for some in chunks(sums):
            if not await self._stored(partial(self.store.record_scorings, [], some)):
                for one in some:  # but for a rollout that was removed
                    await self._stored(partial(self.store.record_scorings, [], [one]))
            self.totals.composed += sum(each.value is not None for each in some)

    async def _stored(self, work: Callable[[], T]) -> T:
        """What was worked out is not lost because the store is away for a while."""
        while True:
            try:
                return await asyncio.to_thread(work)
            except StoreUnavailable as error:
                logger.warning("the store is away, and is tried again: %s", error)
                await asyncio.sleep(_STORE_AGAIN_S)


@dataclass(frozen=True, slots=True)
class _Result:
    attempts: Attempts[Score]
    turns: int  # of the rollout


@dataclass(frozen=True, slots=True)
class _History:
    """Of a rollout: the last scoring of each scorer, and its rewards in order of arrival."""

    scorings: dict[str, Scoring]
    rewards: list[Reward]

    def is_scored(self, scorer: str, candidate: ScoringCandidate) -> bool:
        """As it is now: none of its calls came later. One that training took does not change."""
        last = self.scorings.get(scorer)
        return last is not None and (candidate.is_consumed or last.turns >= candidate.turns)


@dataclass(frozen=True, slots=True)
class _Found:
    """`changed`: those of the candidates that there may be something to do for; `now` by the clock
    of leases."""

    candidates: dict[str, ScoringCandidate]
    changed: dict[str, _History]
    now: float


def _last_of_each(scorings: Sequence[Scoring]) -> dict[str, Scoring]:
    return {each.scorer: each for each in sorted(scorings, key=lambda each: each.round)}


def _outcome(scorer: Scorer, rollout_id: str, result: _Result, history: _History) -> Scoring:
    made, before = result.attempts, history.scorings.get(scorer.name)
    state: Literal["scored", "unknown", "failed"] = "failed"
    if made.result is not None:
        state = "scored" if made.result.is_known else "unknown"
    return Scoring(
        rollout_id=rollout_id,
        scorer=scorer.name,
        digest=scorer.digest,
        turns=result.turns,
        round=0 if before is None else before.round + 1,
        state=state,
        attempts=made.count,
        error=made.error,
        seconds=made.seconds,
        parts=None if made.result is None else dict(made.result.parts),
    )


def _rewards(scorer: Scorer, outcome: Scoring, result: _Result, history: _History) -> list[Reward]:
    """The parts that it gave; what it gave before and does not now is taken back, unless somebody
    else has revised it."""
    score = result.attempts.result or Score({}, {})
    given: dict[str, float | None] = {k: v for k, v in score.parts.items() if v is not None}
    last = {each.name: each for each in history.rewards if each.turn is None}
    before = history.scorings.get(scorer.name)
    for name in (before.parts or {}) if before is not None else ():
        reward = last.get(name)
        if name not in given and reward is not None and reward.source == SCORER_SOURCE:
            given[name] = None
    key = f"{outcome.rollout_id}\n{scorer.name}\n{outcome.round}"
    return [
        Reward(
            reward_id=hashlib.sha256(f"{key}\n{name}".encode()).hexdigest()[:32],
            rollout_id=outcome.rollout_id,
            value=value,
            name=name,
            source=SCORER_SOURCE,
            label=scorer.label,
            comment=score.comments.get(name),
        )
        for name, value in given.items()
    ]


def score_now(
    store: Store,
    settings: RewardSettings,
    scope: ScoringScope,
    *,
    rollout_ids: Collection[str] | None = None,
    again: Again = "no",
) -> ScoringTotals:
    """All that is due now; groups are judged smaller, where nobody completes them.

    Raises:
        FunctionUnusable: a function cannot be imported.
        ValueError: the judge has no key.
        StoreError: the store is no use.
    """

    async def score() -> ScoringTotals:
        async with ScoringRun(store, settings, scope) as run:
            return await run.finish(rollout_ids=rollout_ids, again=again)

    return asyncio.run(score())
