"""Which rollouts are meant: one form for lists, exports, retention and redaction."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, and_, exists, func, or_, true

from tracegrad.events import Outcome
from tracegrad.store.expressions import (
    begins_with,
    has_tags,
    is_held_out,
    latest_reward,
    training_state,
)
from tracegrad.store.models import Rollouts, TurnLedger, Turns
from tracegrad.store.types import HELD_OUT

# Characters of a task's hash, and how many of them name it.
TASK_HASH_LENGTH, MIN_TASK_PREFIX = 16, 8
_HEX = "0123456789abcdef"

OPEN = "open"
OUTCOMES = (OPEN, *(outcome.value for outcome in Outcome))
# As `training_state` has them, and of those that are `consumed` the `trained` and the `skipped`.
STATES = (
    *(OPEN, "no_turns", "no_reward", "named_reward", "scoring_failed", "no_task", "waiting"),
    *("leased", HELD_OUT),
    *("trained", "skipped", "consumed"),
    *(outcome.value for outcome in Outcome if not outcome.scored),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Rollouts for which all that is given holds.

    `task` is an id, or of a hash its first 8 characters or more. `outcome` is an `Outcome` or
    "open", `state` one of `STATES` (`RolloutSummary.state`, as it is now).
    `since` and `until` are seconds since the epoch, of the opening: `since <= opened_at < until`.
    Rewards and versions are inclusive bounds; a version is in them if it sampled the last token of
    any of the rollout's turns. `held_out`: those that are marked so, or the others. ValueError
    names the field.
    """

    task: str | None = None
    agent: str | None = None
    outcome: str | None = None
    state: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    since: float | None = None
    until: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_version: int | None = None
    max_version: int | None = None
    held_out: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("outcome", OUTCOMES), ("state", STATES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"{name}: {value!r}; use {', '.join(known)}")
        for name in ("since", "until", "min_reward", "max_reward"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name}: {value} is no finite number")

    @property
    def matches_all(self) -> bool:
        """Whether nothing is asked."""
        return self == RolloutFilter()

    def where(self, *, by_task_index: bool = True) -> ColumnElement[bool]:
        """Of `Rollouts`. `by_task_index`: databases may look a task up; not where another index
        leads to the few rollouts that are asked about."""
        wanted: list[ColumnElement[bool]] = [true(), has_tags(self.tags)]
        if self.task is not None:
            wanted.append(_is_task(self.task, by_task_index))
        if self.agent is not None:
            wanted.append(Rollouts.agent == self.agent)
        if self.outcome is not None:
            wanted.append(
                Rollouts.outcome.is_(None)
                if self.outcome == OPEN
                else Rollouts.outcome == self.outcome
            )
        if self.state is not None:
            wanted.append(_stands_so(self.state))
        if self.since is not None:
            wanted.append(Rollouts.opened_at >= self.since)
        if self.until is not None:
            wanted.append(Rollouts.opened_at < self.until)
        if self.min_reward is not None:
            wanted.append(latest_reward() >= self.min_reward)
        if self.max_reward is not None:
            wanted.append(latest_reward() <= self.max_reward)
        if self.held_out is not None:
            wanted.append(is_held_out() if self.held_out else ~is_held_out())
        wanted += self._versions()
        return and_(*wanted)

    def _versions(self) -> list[ColumnElement[bool]]:
        bounds: list[ColumnElement[bool]] = []
        if self.min_version is not None:
            bounds.append(Turns.last_version >= self.min_version)
        if self.max_version is not None:
            bounds.append(Turns.last_version <= self.max_version)
        if not bounds:
            return []
        return [exists().where(Turns.rollout_id == Rollouts.rollout_id, *bounds)]


def _is_task(task: str, by_index: bool) -> ColumnElement[bool]:
    """Of a hash, which `tracegrad.task_ids` makes, its beginning is enough."""
    # The same text, and nothing that an index has.
    task_id = Rollouts.task_id if by_index else Rollouts.task_id.concat("")
    named = task_id == task
    if not (MIN_TASK_PREFIX <= len(task) < TASK_HASH_LENGTH and set(task) <= {*_HEX}):
        return named
    is_hash = and_(
        func.length(Rollouts.task_id) == TASK_HASH_LENGTH, func.ltrim(Rollouts.task_id, _HEX) == ""
    )
    return or_(named, and_(begins_with(task_id, task), is_hash))


def _stands_so(state: str) -> ColumnElement[bool]:
    if state == HELD_OUT:
        return is_held_out()
    if state not in ("trained", "skipped"):
        return training_state({}, time.time()) == state
    trained = exists().where(
        Turns.rollout_id == Rollouts.rollout_id,
        TurnLedger.turn_id == Turns.turn_id,
        TurnLedger.step.is_not(None),
    )
    consumed = Rollouts.consumed_at.is_not(None)
    return and_(consumed, trained if state == "trained" else ~trained)


ALL = RolloutFilter()
