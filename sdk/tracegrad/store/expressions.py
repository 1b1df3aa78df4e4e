"""SQL expressions that queries and the ledger share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func, literal, not_, or_, select, true
from sqlalchemy.orm import InstrumentedAttribute, aliased

from tracegrad.events import MAX_REWARD, Outcome
from tracegrad.store.models import Rewards, Rollouts, RolloutTags, Scorings, Turns
from tracegrad.store.types import COMPOSED_SOURCE, HELD_OUT, RULE_SOURCE

SCORED_OUTCOMES = [outcome.value for outcome in Outcome if outcome.scored]
# The event name whose latest value, given for the whole rollout, is the rollout's reward.
MAIN_REWARD_NAME = "reward"


def begins_with(
    column: ColumnElement[str] | InstrumentedAttribute[str] | InstrumentedAttribute[str | None],
    prefix: str,
) -> ColumnElement[bool]:
    """As a range, which every database finds in an index; the last code point is no character."""
    return and_(column >= prefix, column < prefix + "\U0010ffff")


def has_tags(tags: Mapping[str, str]) -> ColumnElement[bool]:
    """The rollout carries every one of `tags`."""
    return and_(
        true(),
        *(
            exists().where(
                RolloutTags.rollout_id == Rollouts.rollout_id,
                RolloutTags.key == key,
                RolloutTags.value == value,
            )
            for key, value in tags.items()
        ),
    )


def is_held_out(tags: Mapping[str, str] | None = None) -> ColumnElement[bool]:
    """Of `Rollouts`: it is for evaluation, and never trained. Whoever opened it said so, or it
    carries every one of `tags` (`promotion.tags`), where there are some."""
    marked = Rollouts.held_out.is_(True)
    return or_(marked, has_tags(tags)) if tags else marked


def is_selected(tags: Mapping[str, str]) -> ColumnElement[bool]:
    """Of `Rollouts`: training that selects by `tags` may take it."""
    return and_(~is_held_out(), has_tags(tags))


def is_rewardable(
    tags: Mapping[str, str], held_out: Mapping[str, str] | None = None
) -> ColumnElement[bool]:
    """Of `Rollouts`: training that selects by `tags` may take it, or it is for evaluation
    (`is_held_out(held_out)`), whatever its other tags: either needs a reward."""
    return or_(has_tags(tags), is_held_out(held_out))


def has_turns() -> ColumnElement[bool]:
    """Without any, a rollout's reward says nothing of the policy, and is compared with none."""
    return exists().where(Turns.rollout_id == Rollouts.rollout_id).correlate(Rollouts)


def newest_turn() -> ColumnElement[float | None]:
    """When the turn was made that was stored last; NULL: there is none."""
    return (
        select(Turns.created_at)
        .where(Turns.rollout_id == Rollouts.rollout_id)
        .order_by(Turns.seq.desc())
        .limit(1)
        .correlate(Rollouts)
        .scalar_subquery()
    )


def is_left_open() -> ColumnElement[bool]:
    """Of `Rollouts`: nobody opened it, and it has no end."""
    return and_(
        Rollouts.consumed_at.is_(None),
        Rollouts.finished_at.is_(None),
        Rollouts.opened.is_(False),
    )


def is_idle(before: float) -> ColumnElement[bool]:
    """Of `Rollouts`: nobody opened or ended it, and the newest of its turns, of which it has some,
    is older than `before`."""
    # A rollout is as old as the first of its turns, or older.
    return and_(is_left_open(), Rollouts.opened_at < before, newest_turn() < before)


def latest_reward(
    *, composed: bool = False, of: ColumnElement[str] | None = None
) -> ColumnElement[float | None]:
    """The rollout's reward, or NULL: the one that arrived last, unless that took it back. Where one
    was composed, the last of those: what is given under the same name is one of its parts.

    `composed`: only such rewards count, and those of rules; what else was given waits for the sum
    that it is a part of. `of`: the rollout's id in a query that is not over `Rollouts`. Stores of
    the time before rewards were bounded may hold some that would be refused today.
    """
    rollout: Any = Rollouts.rollout_id if of is None else of
    counting = Rewards.source.in_((COMPOSED_SOURCE, RULE_SOURCE)) if composed else true()
    return (
        select(Rewards.value)
        .where(
            Rewards.rollout_id == rollout,
            Rewards.name == MAIN_REWARD_NAME,
            Rewards.turn.is_(None),
            Rewards.value.between(-MAX_REWARD, MAX_REWARD) | Rewards.value.is_(None),
            counting,
        )
        .order_by(case((Rewards.source == COMPOSED_SOURCE, 0), else_=1), Rewards.seq.desc())
        .limit(1)
        .correlate(rollout.table)
        .scalar_subquery()
    )


def newest_reward() -> ColumnElement[int | None]:
    """The number of the rollout's reward that arrived last, whatever its name; NULL: it has none.

    Of this rollout alone: PostgreSQL numbers rewards before their transactions commit, so that
    the newest of all may have a higher number than one that nobody sees yet.
    """
    return (
        select(func.max(Rewards.seq))
        .where(Rewards.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )


def _without_main_reward() -> ColumnElement[str]:
    """Of a rollout that nobody scored, of one that a scorer failed with, and of one that has
    rewards of other names, or of turns alone, which training does not compare rollouts by."""
    main = and_(Rewards.name == MAIN_REWARD_NAME, Rewards.turn.is_(None))
    some = (
        exists()
        .where(Rewards.rollout_id == Rollouts.rollout_id, Rewards.value.is_not(None), not_(main))
        .correlate(Rollouts)
    )
    return case(
        (has_failed_scoring(), literal("scoring_failed")),
        (some, literal("named_reward")),
        else_=literal("no_reward"),
    )


def _has_sum() -> ColumnElement[bool]:
    """Of `Rollouts`: its reward was composed, whatever became of that."""
    some = exists().where(
        Rewards.rollout_id == Rollouts.rollout_id, Rewards.source == COMPOSED_SOURCE
    )
    return some.correlate(Rollouts)


def has_failed_scoring() -> ColumnElement[bool]:
    """Of `Rollouts`: a scorer failed with it, and did not score it later."""
    failed = exists().where(
        Scorings.rollout_id == Rollouts.rollout_id, Scorings.state == "failed", is_last_scoring()
    )
    return failed.correlate(Rollouts)


def is_last_scoring() -> ColumnElement[bool]:
    """Of `Scorings`: no later one of its scorer replaced it."""
    later = aliased(Scorings)
    return ~(
        exists()
        .where(
            later.rollout_id == Scorings.rollout_id,
            later.scorer == Scorings.scorer,
            later.round > Scorings.round,
        )
        .correlate(Scorings)
    )


def training_state(
    tags: Mapping[str, str],
    now: float,
    *,
    compared: bool = True,
    idle_before: float | None = None,
    composed: bool = False,
) -> ColumnElement[str]:
    """The state of a rollout on its way to training (`RolloutSummary.state`, or `not_selected`).

    `compared`: training compares rollouts of a task, as by default, so that those without one are
    `no_task`; else they are `waiting`. `idle_before`: as if those that are idle since then were
    closed. `composed`: as `latest_reward` has it.
    """
    is_open: ColumnElement[bool] = Rollouts.finished_at.is_(None)
    if idle_before is not None:
        is_open = and_(is_open, not_(is_idle(idle_before)))
    states = [
        (Rollouts.consumed_at.is_not(None), literal("consumed")),
        (is_held_out(), literal(HELD_OUT)),
        (~has_tags(tags), literal("not_selected")),
        (is_open, literal("open")),
        (Rollouts.outcome.not_in(SCORED_OUTCOMES), Rollouts.outcome),
        (~has_turns(), literal("no_turns")),
        (and_(has_failed_scoring(), ~_has_sum()), literal("scoring_failed")),
        (latest_reward(composed=composed).is_(None), _without_main_reward()),
        (Rollouts.leased_until > now, literal("leased")),
    ]
    if compared:
        states.append((Rollouts.task_id.is_(None), literal("no_task")))
    return case(*states, else_=literal("waiting"))
