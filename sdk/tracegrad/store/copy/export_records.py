"""Whole rollouts with all that is known of them, read for a copy of the store or of a part.

Not in a copy: leases, which belong to the processes that hold them, keys, which are secrets, how
scorers ended (the rewards that they gave are), and the record of what maintenance removed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import ColumnElement, exists, select, tuple_

from tracegrad.events import Reward, RolloutFinished, Span, Turn, is_reward
from tracegrad.store.expressions import MAIN_REWARD_NAME
from tracegrad.store.filters import ALL, RolloutFilter
from tracegrad.store.models import (
    PolicyVersions,
    Rollouts,
    Spans,
    Steps,
    TurnLedger,
    Turns,
)
from tracegrad.store.read.rollouts import (
    load_dispositions,
    load_outcomes,
    load_rewards,
    load_spans,
    load_tags,
    version_events,
)
from tracegrad.store.read.turns import load_turns
from tracegrad.store.rows import load, rows_of_keys, select_fields
from tracegrad.store.store import Store
from tracegrad.store.types import COMPOSED_SOURCE, PolicyVersion, StepRecord, TurnDisposition
from tracegrad.turn_scopes import turn_scopes

# Rollouts in memory at once.
_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """`outcome`, `error`, `finished_at` are its state, `outcomes` every reported end."""

    rollout_id: str
    opened: bool = True  # False: only its events are known, not its opening
    opened_at: float
    task_id: str | None = None
    agent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    task: Any = None
    outcome: str | None = None
    error: str | None = None
    finished_at: float | None = None
    consumed_at: float | None = None
    consumed_step: int | None = None
    idle_s: float | None = (
        None  # it has no reported end: it was closed after so long without a call
    )
    continues: str | None = None  # the rollout that its conversation goes on from
    held_out: bool = False  # it is for evaluation, and never trained
    outcomes: Sequence[RolloutFinished] = ()  # in order of arrival
    rewards: Sequence[Reward] = ()  # in order of arrival
    spans: Sequence[Span] = ()  # by start
    turns: Sequence[Turn] = ()  # in order of capture
    dispositions: Mapping[str, TurnDisposition] = field(default_factory=dict)  # by turn id

    @property
    def reward(self) -> float | None:
        """The latest for the whole rollout named "reward", unless it was taken back; where one was
        composed, the latest of those (`expressions.latest_reward`)."""
        events = [
            event
            for event in self.rewards
            if event.name == MAIN_REWARD_NAME
            and event.turn is None
            and (event.value is None or is_reward(event.value))
        ]
        events = [event for event in events if event.source == COMPOSED_SOURCE] or events
        return events[-1].value if events else None

    @property
    def steps(self) -> set[int]:
        """That its ledger names."""
        found = {fate.step for fate in self.dispositions.values() if fate.step is not None}
        return found if self.consumed_step is None else found | {self.consumed_step}

    @property
    def versions(self) -> set[int]:
        """That sampled its tokens."""
        return {version for turn in self.turns for version, _ in turn.policy_versions}

    def untrained(self) -> RolloutRecord:
        """Without what was done with it: all its turns wait."""
        return replace(self, consumed_at=None, consumed_step=None, dispositions={})

    def without_spans(self) -> RolloutRecord:
        """Turns whose agent only a span named, and another than the rollout's, have its name as
        their `agent_name`: they are selected by it."""
        scopes = turn_scopes(self.turns, self.spans, self.agent)
        agents = {turn_id: scope.agent for turn_id, scope in scopes.items()}
        turns = [
            turn
            if turn.agent_name or agents[turn.turn_id] == self.agent
            else replace(turn, agent_name=agents[turn.turn_id])
            for turn in self.turns
        ]
        return replace(self, spans=(), turns=turns)


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The state of a policy version, and all that became of it, in order."""

    current: PolicyVersion
    events: Sequence[PolicyVersion]


def iter_rollouts(
    store: Store,
    wanted: RolloutFilter = ALL,
    *,
    trained: bool | None = None,
    raw: bool = True,
    expert_routing: bool = True,
) -> Iterator[RolloutRecord]:
    """In the order of their ids; a few in memory at once, so that a store may be of any size.

    `trained`: only those of which a turn was, or none was. `raw` asks for requests and responses,
    `expert_routing` for routed experts.
    A rollout that is written meanwhile is as it was at one moment.
    """
    where = [wanted.where(), *_trained(trained)]
    for ids in _pages(store, where):
        yield from _load_records(store, ids, raw=raw, expert_routing=expert_routing)


def iter_task_groups(
    store: Store, wanted: RolloutFilter = ALL, *, trained: bool | None = None, raw: bool = True
) -> Iterator[list[RolloutRecord]]:
    """Rollouts of one task, task by task in the order of their ids; those without one alone.
    Without routed experts."""
    where = [wanted.where(), *_trained(trained)]
    tasks = select(Rollouts.task_id).where(*where, Rollouts.task_id.is_not(None)).distinct()
    with store.reading() as connection:
        names = list(connection.scalars(tasks.order_by(Rollouts.task_id)))
    for name in names:
        pages = _pages(store, [*where, Rollouts.task_id == name])
        ids = [rollout_id for page in pages for rollout_id in page]
        yield _load_records(store, ids, raw=raw, expert_routing=False)
    for ids in _pages(store, [*where, Rollouts.task_id.is_(None)]):
        yield from ([one] for one in _load_records(store, ids, raw=raw, expert_routing=False))


def load_steps(store: Store, steps: Sequence[int] | None = None) -> list[StepRecord]:
    """All steps, or those of these numbers that there are; by number."""
    query = select_fields(StepRecord, Steps).order_by(Steps.step)
    with store.reading() as connection:
        if steps is None:
            return load(connection, StepRecord, query)
        rows = rows_of_keys(connection, query, Steps.step, steps)
        return [StepRecord(**row._mapping) for row in rows]


def load_versions(store: Store, versions: Sequence[int] | None = None) -> list[VersionRecord]:
    """All policy versions, or those of these numbers that there are; by number."""
    query = select_fields(PolicyVersion, PolicyVersions).order_by(PolicyVersions.version)
    wanted = None if versions is None else set(versions)
    with store.reading() as connection:
        return [
            VersionRecord(current, version_events(connection, current.version))
            for current in load(connection, PolicyVersion, query)
            if wanted is None or current.version in wanted
        ]


def iter_spans_without_rollout(store: Store, at_once: int = 1000) -> Iterator[list[Span]]:
    """Spans that belong to no rollout, some at a time."""
    after = ("", "")
    key = (Spans.trace_id, Spans.span_id)
    query = select_fields(Span, Spans).where(Spans.rollout_id.is_(None)).order_by(*key)
    while True:
        with store.reading() as connection:
            spans = load(connection, Span, query.where(tuple_(*key) > after).limit(at_once))
        if not spans:
            return
        yield spans
        after = (spans[-1].trace_id, spans[-1].span_id)


def _trained(trained: bool | None) -> list[ColumnElement[bool]]:
    if trained is None:
        return []
    some = exists().where(
        Turns.rollout_id == Rollouts.rollout_id,
        TurnLedger.turn_id == Turns.turn_id,
        TurnLedger.step.is_not(None),
    )
    return [some if trained else ~some]


def _pages(store: Store, where: Sequence[ColumnElement[bool]]) -> Iterator[list[str]]:
    """Ids do not change and none is taken twice, whatever is written meanwhile."""
    query = select(Rollouts.rollout_id).where(*where).order_by(Rollouts.rollout_id).limit(_PAGE)
    page_query = query
    while True:
        with store.reading() as connection:
            page = list(connection.scalars(page_query))
        if not page:
            return
        yield page
        page_query = query.where(Rollouts.rollout_id > page[-1])


def _load_records(
    store: Store, ids: Sequence[str], *, raw: bool, expert_routing: bool
) -> list[RolloutRecord]:
    query = select_fields(RolloutRecord, Rollouts)
    with store.reading() as connection:
        turns = load_turns(connection, ids, raw=raw, expert_routing=expert_routing)
        rewards = load_rewards(connection, ids)
        tags = load_tags(connection, ids)
        outcomes = load_outcomes(connection, ids)
        spans = load_spans(connection, ids)
        dispositions = load_dispositions(connection, ids)
        rows = rows_of_keys(connection, query, Rollouts.rollout_id, ids)
        here = {row.rollout_id: row._mapping for row in rows}
    return [
        RolloutRecord(
            **{**here[name], "held_out": bool(here[name]["held_out"])},
            tags=tags[name],
            outcomes=outcomes[name],
            rewards=rewards[name],
            spans=spans[name],
            turns=turns[name],
            dispositions=dispositions[name],
        )
        for name in ids
        if name in here
    ]
