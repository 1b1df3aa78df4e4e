"""How far the store is from the next batch: what `lease` would find, as counts, and why it finds
no more. Nothing is read of the turns themselves, so that it can be asked every few seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, func, select

from tracegrad.events import Outcome
from tracegrad.store.databases import statements
from tracegrad.store.expressions import SCORED_OUTCOMES, has_tags, training_state
from tracegrad.store.ledger.idle import inferred_open
from tracegrad.store.ledger.leases import (
    NO_OVER_SAMPLE,
    OverSample,
    form_groups,
    ready_rollouts,
)
from tracegrad.store.models import Rollouts, Steps, TurnLedger, Turns
from tracegrad.store.read.scorings import ScoringFailure, scoring_failures
from tracegrad.store.types import InferredOpen

_UNSCORED = {outcome.value for outcome in Outcome if not outcome.scored}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReadiness:
    """Counts of rollouts that no step consumed, where nothing else is said."""

    is_empty: bool  # nothing was ever captured
    groups: int  # that could be leased now
    attempts: dict[int, int]  # ready rollouts -> tasks that have so many and lack others
    # Seconds until the first task of several of these is leased as a smaller group; None: of none.
    smaller_in_s: float | None
    # As `RolloutSummary.state`, and `not_selected`; `no_task` where groups have several rollouts.
    states: dict[str, int]
    leased: dict[str, int]  # by the lease's owner
    unscored: dict[str, int]  # by outcome, since the last step
    passed: dict[str, int]  # reason -> turns that were looked at since the last step, not trained
    unopened: int  # of the open ones those that nobody opened
    inferred_open: InferredOpen  # of these those with turns
    newest: float | None  # when one with the tags was opened or finished last; None: there is none
    scoring_failures: list[ScoringFailure]  # of rollouts in the state `scoring_failed`


def batch_readiness(
    connection: Connection,
    *,
    group_size: int,
    tags: Mapping[str, str],
    incomplete_after_s: float,
    over_sample: OverSample = NO_OVER_SAMPLE,
    composed: bool = False,
    held_out: Mapping[str, str] | None = None,
) -> BatchReadiness:
    """`incomplete_after_s` and `composed` as `Ledger.lease` has them."""
    now = statements.server_time(connection)
    ready = ready_rollouts(
        connection, tags, now, alone=group_size == 1, composed=composed, held_out=held_out
    )
    formed = form_groups(ready, group_size, now - incomplete_after_s, over_sample)
    taken = {rollout.rollout_id for group in formed for rollout in group}
    lacking = [each for each in ready if each.rollout_id not in taken]
    left = Counter(each.task_id for each in lacking)
    newest = {each.task_id: each.finished_at for each in lacking}  # the last of each
    due = [at + incomplete_after_s - now for task, at in newest.items() if left[task] >= 2]
    state = training_state(tags, now, compared=group_size > 1, composed=composed)
    states, unopened = _states(connection, state)
    unscored, passed = _consumed_since_the_last_step(connection, tags)
    unscored.update({name: states[name] for name in _UNSCORED & states.keys()})
    return BatchReadiness(
        is_empty=connection.scalar(select(Rollouts.rollout_id).limit(1)) is None,
        groups=len(formed),
        attempts=dict(Counter(left.values())),
        smaller_in_s=min(due, default=None),
        states=states,
        leased=_leased(connection, tags, now),
        unscored=dict(unscored),
        passed=dict(passed),
        unopened=unopened,
        inferred_open=inferred_open(connection, tags, now),
        newest=_newest(connection, tags),
        scoring_failures=scoring_failures(connection, state == "scoring_failed")
        if states.get("scoring_failed")
        else [],
    )


def _states(connection: Connection, state: ColumnElement[str]) -> tuple[dict[str, int], int]:
    """How many are in each, and how many of the open ones nobody opened."""
    found = (
        select(state.label("state"), Rollouts.opened)
        .where(Rollouts.consumed_at.is_(None))
        .subquery()
    )
    kinds = (found.c.state, found.c.opened)
    rows = connection.execute(select(*kinds, func.count()).group_by(*kinds)).all()
    states: Counter[str] = Counter()
    for name, _, count in rows:
        states[str(name)] += count
    return dict(states), sum(n for name, opened, n in rows if name == "open" and not opened)


@dataclass(frozen=True, slots=True)
class NewestStates:
    """How many are in each state; `is_cut`: there are more, which were not looked at."""

    counts: dict[str, int]
    is_cut: bool


def newest_states(
    connection: Connection,
    tags: Mapping[str, str],
    *,
    compared: bool,
    composed: bool = False,
    most: int,
) -> NewestStates:
    """Of the rollouts that no step consumed, how many are in each state (`_states`): of those that
    are open and of those that ended, `most` of each at most, the newest; so that it takes no longer
    where millions are there."""
    now = statements.server_time(connection)
    state = training_state(tags, now, compared=compared, composed=composed).label("state")
    of = Rollouts.consumed_at.is_(None)
    ended = (of, Rollouts.finished_at.is_not(None))
    parts = (
        select(state).where(*ended).order_by(Rollouts.finished_at.desc()),
        select(state).where(of, Rollouts.finished_at.is_(None)).order_by(Rollouts.opened_at.desc()),
    )
    counts: Counter[str] = Counter()
    is_cut = False
    for part in parts:
        states = connection.scalars(part.limit(most + 1)).all()
        counts.update(map(str, states[:most]))
        is_cut = is_cut or len(states) > most
    return NewestStates(dict(counts), is_cut)


def _leased(connection: Connection, tags: Mapping[str, str], now: float) -> dict[str, int]:
    query = select(Rollouts.lease_owner, func.count()).where(
        Rollouts.consumed_at.is_(None), Rollouts.leased_until > now, has_tags(tags)
    )
    rows = connection.execute(query.group_by(Rollouts.lease_owner))
    return {str(owner): count for owner, count in rows}


def _consumed_since_the_last_step(
    connection: Connection, tags: Mapping[str, str]
) -> tuple[Counter[str], Counter[str]]:
    """Rollouts by their outcome, and turns of scored ones by the reason that they were skipped."""
    newest = select(Steps.step, Steps.created_at).order_by(Steps.step.desc()).limit(1)
    since = 0.0
    if (step := connection.execute(newest).first()) is not None:
        # Of the clock that `consumed_at` has: the trainer's own, which wrote the step's row, may go
        # otherwise. It is all that is left where the step's rollouts were pruned.
        last = select(func.max(TurnLedger.created_at)).where(TurnLedger.step == step.step)
        since = connection.scalar(last) or step.created_at
    consumed = (Rollouts.consumed_at > since, Rollouts.consumed_step.is_(None), has_tags(tags))
    scored = Rollouts.outcome.in_(SCORED_OUTCOMES)
    outcomes = select(Rollouts.outcome, func.count()).where(*consumed, ~scored)
    reasons = (
        select(TurnLedger.skip_reason, func.count())
        .join(Turns, Turns.turn_id == TurnLedger.turn_id)
        .join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
        .where(*consumed, scored)
    )
    by_outcome = connection.execute(outcomes.group_by(Rollouts.outcome))
    by_reason = connection.execute(reasons.group_by(TurnLedger.skip_reason))
    return (
        Counter({str(name): count for name, count in by_outcome}),
        Counter({str(name): count for name, count in by_reason}),
    )


def _newest(connection: Connection, tags: Mapping[str, str]) -> float | None:
    """Consumed ones too are asked for their beginning: do agents still run?"""
    opened = select(Rollouts.opened_at).where(has_tags(tags))
    finished = select(Rollouts.finished_at).where(
        Rollouts.consumed_at.is_(None), Rollouts.finished_at.is_not(None), has_tags(tags)
    )
    times = (
        connection.scalar(opened.order_by(Rollouts.opened_at.desc()).limit(1)),
        connection.scalar(finished.order_by(Rollouts.finished_at.desc()).limit(1)),
    )
    return max((each for each in times if each is not None), default=None)
