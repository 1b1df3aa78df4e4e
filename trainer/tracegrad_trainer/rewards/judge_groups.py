"""Which rollouts without a task the judge compares with each other, and what the others wait for.

Worked out anew at each look, from the store alone: nothing is kept but the texts that were read. A
group is written down when it was judged, with its scores (`Store.record_scorings`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tracegrad.events import Turn
from tracegrad.proxy.dialects.history import recorded_call
from tracegrad.store import Store
from tracegrad.store.databases import statements
from tracegrad.store.read.first_turns import first_turns_of
from tracegrad.store.read.scorings import ScoringCandidate, load_scorings, scoring_candidates
from tracegrad.store.read.turns import find_turn
from tracegrad_trainer.rewards.config import JudgeSettings
from tracegrad_trainer.rewards.result import JUDGE
from tracegrad_trainer.rewards.similar_tasks import (
    TaskText,
    form_similar_groups,
    is_ungrouped,
    left_alone,
    task_text,
)

# Rollouts that wait for others, the newest: what found nothing similar for so long never may. All
# are compared with each other, which takes a third of a second where none is like another.
MOST_WAITING = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeGroup:
    """`lacks`: rollouts until it is whole; `smaller_in_s`: seconds until it is judged as it is;
    None: it is one rollout, which is compared with none. Both of a group that is due are 0."""

    rollouts: list[str]
    title: str
    lacks: int
    smaller_in_s: float | None


@dataclass(slots=True)
class TaskTexts:
    """Of one store, each read once. `held_out`: tags of rollouts that are never trained, and not
    compared with others."""

    store: Store
    held_out: Mapping[str, str] | None = None
    _known: dict[str, TaskText | None] = field(default_factory=dict)

    def read(self, candidates: Sequence[ScoringCandidate]) -> list[TaskText]:
        """Of the newest that say what they were asked; the others are forgotten. Raises
        StoreError."""
        newest = sorted(candidates, key=_age)[-MOST_WAITING:]
        names = {each.rollout_id for each in newest}
        self._known = {name: text for name, text in self._known.items() if name in names}
        new = [each for each in newest if each.rollout_id not in self._known]
        if new:
            self._load(new)
        return [found for each in newest if (found := self._known[each.rollout_id]) is not None]

    def _load(self, candidates: Sequence[ScoringCandidate]) -> None:
        names = [each.rollout_id for each in candidates]
        with self.store.reading() as connection:
            found = first_turns_of(connection, names, self.held_out)

            def find(turn_id: str) -> Turn | None:
                return find_turn(connection, turn_id, expert_routing=False)

            for each in candidates:
                first = found.get(each.rollout_id)
                turn = None if first is None else find(first.turn_id)
                call = None if turn is None else recorded_call(turn, find)
                self._known[each.rollout_id] = task_text(
                    each.rollout_id,
                    each.finished_at or 0.0,
                    [] if call is None else call.messages,
                    kind=["held out"] if first is not None and first.held_out else [],
                )


def _age(candidate: ScoringCandidate) -> tuple[float, str]:
    return candidate.finished_at or 0.0, candidate.rollout_id


def similar_groups(
    texts: Sequence[TaskText],
    settings: JudgeSettings,
    *,
    size: int,
    incomplete_after_s: float,
    now: float,
) -> list[JudgeGroup]:
    """`now` by the clock of the ends."""
    return [
        JudgeGroup(
            rollouts=[each.rollout_id for each in group],
            title=group[0].title,
            lacks=size - len(group),
            smaller_in_s=_smaller_in_s(group, size, incomplete_after_s, now),
        )
        for group in form_similar_groups(texts, size=size, least=settings.similarity)
    ]


def _smaller_in_s(
    group: Sequence[TaskText], size: int, incomplete_after_s: float, now: float
) -> float | None:
    if len(group) == size:
        return 0.0
    if len(group) < 2:
        return None
    return max(0.0, group[-1].finished_at + incomplete_after_s - now)


def lone_rollouts(candidates: Collection[ScoringCandidate]) -> set[str]:
    """Those that were judged with others of which none is left: one went on, say."""
    return left_alone(
        {
            each.rollout_id: each.task_id
            for each in candidates
            if each.is_finished and not each.is_consumed
        }
    )


def groups_to_judge(
    store: Store,
    settings: JudgeSettings,
    *,
    tags: Mapping[str, str],
    size: int,
    incomplete_after_s: float,
    held_out: Mapping[str, str] | None,
) -> tuple[list[JudgeGroup], int]:
    """Those that the judge has not compared yet, and how many rollouts do not say what they were
    asked. Changes nothing. Raises StoreError."""
    with store.reading() as connection:
        now = statements.server_time(connection)
        # Of what training took nothing is compared any more, whatever was said of it since.
        candidates = scoring_candidates(connection, tags, rewards_after=2**62)
        scorings = load_scorings(connection, [each.rollout_id for each in candidates])
    lone = lone_rollouts(candidates)

    def is_due(each: ScoringCandidate) -> bool:
        turns = [one.turns for one in scorings[each.rollout_id] if one.scorer == JUDGE]
        return each.rollout_id in lone or not turns or turns[-1] < each.turns

    waiting = [
        each
        for each in candidates
        if each.is_finished and not each.is_consumed and is_ungrouped(each.task_id) and is_due(each)
    ]
    texts = TaskTexts(store, held_out).read(waiting)
    groups = similar_groups(
        texts, settings, size=size, incomplete_after_s=incomplete_after_s, now=now
    )
    return groups, min(len(waiting), MOST_WAITING) - len(texts)
