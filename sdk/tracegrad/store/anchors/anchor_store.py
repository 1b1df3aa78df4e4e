"""Rollouts that start behind the first turns of a demonstration (IPA, arXiv 2512.24873).

The demonstration of a task is a rollout of it that succeeded and has all its tokens, whoever
sampled it. A rollout from anchor k is opened here with copies of the demonstration's turns before
k, marked as such; the agent brings a fresh environment behind the same calls and continues under
the new rollout's id.

The state of each task is in the store: it outlives processes, and several may share it. The result
of a rollout is counted once, when the task's next rollout is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import msgspec
from sqlalchemy import Connection, select

from tracegrad.events import UNACKNOWLEDGED, Event, Json, RolloutStarted, Turn, new_id
from tracegrad.store.anchors import schedule
from tracegrad.store.anchors.schedule import AnchorSettings, AnchorState
from tracegrad.store.databases import upsert
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.expressions import SCORED_OUTCOMES, is_held_out, latest_reward
from tracegrad.store.models import Rollouts, TaskAnchors, Turns
from tracegrad.store.read.training_samples import deciding_turn
from tracegrad.store.rows import rows_of_keys
from tracegrad.store.store import Store
from tracegrad.store.types import DEMONSTRATION

# Rollouts of a task whose end is waited for. Agents that die leave theirs open for good.
MAX_PENDING = 4096
# A rollout that was given out and is not in the store: its opening is on the way, or was pruned.
FORGET_MISSING_AFTER_S = 3600.0
# Successes of a task among which its first demonstration is looked for, the newest ones.
MAX_CANDIDATES = 32
# As stores of before the first release have them.
_OLD_KEYS = {"demonstration": "expert", "pending": "coming"}


class PendingRollout(NamedTuple):
    """A rollout that was given out and is not counted yet."""

    rollout_id: str
    demonstration: str
    anchor: int
    given_at: float
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """The state of a task. `anchors` is None before it has a demonstration."""

    demonstration: str | None = None
    anchors: AnchorState | None = None
    queue: tuple[int, ...] = ()  # anchors of the rollouts that are next
    pending: tuple[PendingRollout, ...] = ()
    counted: int = 0  # scored rollouts since the demonstration was chosen
    best: tuple[str, int] | None = None  # the best success since: its id and its turns

    def as_json(self) -> Json:
        json: Json = msgspec.to_builtins(self, str_keys=True)
        return json

    @classmethod
    def from_json(cls, known: Json) -> Self:
        older = {new: known[old] for new, old in _OLD_KEYS.items() if old in known}
        return msgspec.convert({**older, **known}, cls, str_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFromAnchor:
    """A rollout that was opened from an anchor.

    `turns` are its first ones: those of the demonstration before the anchor, and behind them the
    one at the anchor, which was not taken here (`sampling["taken"]` is False): it is there to be
    imitated. Both are empty where the task has no demonstration yet: it is sampled from its start.
    """

    rollout_id: str
    task_id: str  # of the rollout: those from one anchor are compared with each other
    anchor: int
    demonstration: str | None
    demonstration_turns: int
    turns: list[Turn] = field(default_factory=list)
    request: Json | None = None  # the demonstration's at the anchor, with all messages before it
    responses: list[Json | None] = field(default_factory=list)  # of the turns before it


class AnchorStore:
    """Anchors of tasks in a store. Every method may raise `StoreUnavailable`."""

    def __init__(self, store: Store, settings: AnchorSettings) -> None:
        self._store = store
        self._settings = settings

    def task_state(self, task_id: str) -> TaskState:
        """Without what ended since the task was last asked for."""
        with self._store.reading() as connection:
            return _load(connection, task_id)

    def next(
        self,
        task_id: str,
        *,
        count: int = 1,
        counts: bool = True,
        agent: str | None = None,
        tags: Mapping[str, str] | None = None,
        task: Any = None,
    ) -> list[RolloutFromAnchor]:
        """Open the task's next rollouts, with the turns that come before their anchors.

        Their tags say the task (`anchor_task`) and the anchor (`anchor`).

        Args:
            count: how many.
            counts: False: their successes say nothing of the policy, as where the agent explores.

        Raises:
            ValueError: `count` is below 1.
            StoreCorrupt: the demonstration cannot be read, or was changed at this moment.
        """
        if count < 1:
            raise ValueError(f"count: {count}; open at least one rollout")
        with self._store.exclusive() as connection:
            state = self._counted(connection, _load(connection, task_id))
            state = self._with_demonstration(connection, state, task_id)
            given, state = self._allot(state, count, task_id, counts=counts)
            _save(connection, task_id, state)
        found = [self._opened(task_id, state, *each) for each in given]
        if state.demonstration is not None:
            demonstration = self._demonstration(state.demonstration, found[0].demonstration_turns)
            found = [_with_turns(each, demonstration) for each in found]
        events: list[Event] = []
        for one in found:
            anchor_tags = {"anchor_task": task_id, "anchor": str(one.anchor)}
            events.append(
                RolloutStarted(
                    rollout_id=one.rollout_id,
                    task_id=one.task_id,
                    agent=agent,
                    tags={**(tags or {}), **anchor_tags},
                    task=task,
                )
            )
            events += one.turns
        self._store.append(events)
        return found

    def _opened(
        self, task_id: str, state: TaskState, rollout_id: str, anchor: int
    ) -> RolloutFromAnchor:
        return RolloutFromAnchor(
            rollout_id=rollout_id,
            task_id=task_id if state.demonstration is None else f"{task_id}@{anchor}",
            anchor=anchor,
            demonstration=state.demonstration,
            demonstration_turns=state.anchors.turns if state.anchors else 0,
        )

    def _counted(self, connection: Connection, state: TaskState) -> TaskState:
        """What ended since, in the order in which it did."""
        ended = _ended(connection, state.pending)
        now, gone = time.time(), set[str]()
        for one in state.pending:
            if one.rollout_id not in ended and now - one.given_at > FORGET_MISSING_AFTER_S:
                gone.add(one.rollout_id)
        for one, end in sorted(
            ((one, ended[one.rollout_id]) for one in state.pending if one.rollout_id in ended),
            key=lambda pair: (pair[1].finished_at or 0.0, pair[0].rollout_id),
        ):
            if end.finished_at is None or (end.scored and end.reward is None):
                continue  # its reward may still come
            gone.add(one.rollout_id)
            if one.counts and end.scored and end.reward is not None:
                state = self._observed(
                    connection, state, one, success=end.reward >= self._settings.success
                )
        pending = tuple(one for one in state.pending if one.rollout_id not in gone)
        return replace(state, pending=pending)

    def _observed(
        self, connection: Connection, state: TaskState, one: PendingRollout, *, success: bool
    ) -> TaskState:
        if state.anchors is None or one.demonstration != state.demonstration:
            return state  # of a demonstration that was replaced
        anchors = schedule.observe(state.anchors, one.anchor, [success], self._settings)
        queue = state.queue
        if anchors.at != state.anchors.at:
            # What was planned from the old anchor, but for a group that was begun.
            queue = queue[: len(queue) % self._settings.group_size]
        state = replace(state, anchors=anchors, queue=queue, counted=state.counted + 1)
        if not success or self._settings.refresh is None:
            return state
        turns = _turns_taken(connection, one.rollout_id)
        most = anchors.turns if state.best is None else state.best[1]
        if turns is None or turns > most:
            return state
        return replace(state, best=(one.rollout_id, turns))

    def _with_demonstration(
        self, connection: Connection, state: TaskState, task_id: str
    ) -> TaskState:
        """With a demonstration that is there: the one so far, a better one, or the first."""
        refresh, anchors = self._settings.refresh, state.anchors
        if refresh is not None and state.best is not None and state.counted >= refresh:
            demonstration, turns = state.best
            if anchors is not None and _turns_taken(connection, demonstration) == turns:
                return TaskState(
                    demonstration=demonstration,
                    anchors=schedule.with_new_demonstration(anchors, turns),
                    pending=state.pending,
                )
        if (
            state.demonstration is not None
            and anchors is not None
            and _turns_taken(connection, state.demonstration) == anchors.turns
        ):
            return state
        first = _first_demonstration(connection, task_id, self._settings.success)
        if first is None:
            return TaskState(anchors=anchors, pending=state.pending)
        demonstration, turns = first
        begun = (
            schedule.start_at_last_turn(turns)
            if anchors is None
            else schedule.with_new_demonstration(anchors, turns)
        )
        return TaskState(demonstration=demonstration, anchors=begun, pending=state.pending)

    def _allot(
        self, state: TaskState, count: int, task_id: str, *, counts: bool
    ) -> tuple[list[tuple[str, int]], TaskState]:
        """New ids with their anchors."""
        if state.anchors is None or state.demonstration is None:
            return [(new_id(), 0) for _ in range(count)], state
        anchors, queue = state.anchors, list(state.queue)
        while len(queue) < count:
            settings = self._settings
            quotas, anchors = schedule.plan(anchors, settings.groups, settings, task=task_id)
            for anchor, groups in quotas.items():
                queue += [anchor] * (groups * settings.group_size)
        given = [
            PendingRollout(new_id(), state.demonstration, anchor, time.time(), counts)
            for anchor in queue[:count]
        ]
        state = replace(
            state,
            anchors=anchors,
            queue=tuple(queue[count:]),
            pending=(*state.pending, *given)[-MAX_PENDING:],
        )
        return [(one.rollout_id, one.anchor) for one in given], state

    def _demonstration(self, rollout_id: str, turns: int) -> _Demonstration:
        every = self._store.rollout_turns(rollout_id)
        taken = [turn for turn in every if _taken(turn)]
        if len(taken) != turns:
            raise StoreCorrupt(f"rollout {rollout_id}, the demonstration, was changed; ask again")
        with self._store.reading() as connection:
            reward = connection.scalar(
                select(latest_reward()).where(Rollouts.rollout_id == rollout_id)
            )
        marked = deciding_turn(self._store.rewards(rollout_id), every)
        decides = turns - 1
        if marked is not None and _taken(every[marked]):
            decides = taken.index(every[marked])
        return _Demonstration(taken, decides, reward)


class _Demonstration(NamedTuple):
    turns: list[Turn]
    decides: int  # index of the deciding one
    reward: float | None


def _with_turns(found: RolloutFromAnchor, demonstration: _Demonstration) -> RolloutFromAnchor:
    """With copies of the demonstration's turns before the anchor, and of the one at it."""
    ids = {turn.turn_id: new_id() for turn in demonstration.turns[: found.anchor + 1]}
    turns = []
    for index, turn in enumerate(demonstration.turns[: found.anchor + 1]):
        sampling: Json = {
            "source": DEMONSTRATION,
            "reward": demonstration.reward,
            "distance": abs(demonstration.decides - index),
        }
        before = index < found.anchor
        turns.append(
            replace(
                turn,
                turn_id=ids[turn.turn_id],
                rollout_id=found.rollout_id,
                parent_id=ids.get(turn.parent_id or ""),
                sampling=sampling if before else {**sampling, "taken": False},
                parent_span_id=None,
                timing=None,
                # Nothing goes on from a turn that was not taken.
                request=turn.request if before else None,
                response=turn.response if before else None,
                created_at=time.time(),
            )
        )
    return replace(
        found,
        turns=turns,
        request=demonstration.turns[found.anchor].request,
        responses=[turn.response for turn in demonstration.turns[: found.anchor]],
    )


class _End(NamedTuple):
    finished_at: float | None
    scored: bool
    reward: float | None


def _taken(turn: Turn) -> bool:
    return _is_taken(turn.sampling, turn.untrainable)


def _is_taken(sampling: Json, untrainable: str | None) -> bool:
    """Whether the rollout went on from it: not where it is only there to be imitated, nor where
    its client was refused, and has asked again."""
    return sampling.get("taken") is not False and untrainable != UNACKNOWLEDGED


def _load(connection: Connection, task_id: str) -> TaskState:
    query = select(TaskAnchors.state).where(TaskAnchors.task_id == task_id)
    state = connection.scalar(query)
    return TaskState() if state is None else TaskState.from_json(state)


def _save(connection: Connection, task_id: str, state: TaskState) -> None:
    row = {"task_id": task_id, "state": state.as_json(), "changed_at": time.time()}
    connection.execute(upsert(connection, TaskAnchors, "task_id"), row)


def _ended(connection: Connection, pending: Sequence[PendingRollout]) -> dict[str, _End]:
    """Those that are in the store, ended or not."""
    query = select(Rollouts.rollout_id, Rollouts.finished_at, Rollouts.outcome, latest_reward())
    ids = [one.rollout_id for one in pending]
    return {
        rollout_id: _End(finished_at, outcome in SCORED_OUTCOMES, reward)
        for rollout_id, finished_at, outcome, reward in rows_of_keys(
            connection, query, Rollouts.rollout_id, ids
        )
    }


def _turns_taken(connection: Connection, rollout_id: str) -> int | None:
    """How many turns the rollout took; None where it has none, or one without tokens."""
    query = select(
        Turns.prompt_tokens, Turns.completion_tokens, Turns.sampling, Turns.untrainable
    ).where(Turns.rollout_id == rollout_id)
    turns = 0
    for prompt, completion, sampling, untrainable in connection.execute(query):
        if not _is_taken(sampling, untrainable):
            continue
        if not prompt or not completion:
            return None
        turns += 1
    return turns or None


def _first_demonstration(
    connection: Connection, task_id: str, success: float
) -> tuple[str, int] | None:
    """Of the newest successes the one with the fewest turns, and how many those are."""
    reward = latest_reward()
    query = (
        select(Rollouts.rollout_id)
        .where(
            Rollouts.task_id == task_id,
            Rollouts.outcome.in_(SCORED_OUTCOMES),
            reward >= success,
            ~is_held_out(),  # what is imitated is trained
        )
        .order_by(Rollouts.finished_at.desc(), Rollouts.rollout_id.desc())
        .limit(MAX_CANDIDATES)
    )
    found: tuple[str, int] | None = None
    for rollout_id in connection.scalars(query).all():
        turns = _turns_taken(connection, rollout_id)
        if turns is not None and (found is None or turns < found[1]):
            found = (rollout_id, turns)
    return found
