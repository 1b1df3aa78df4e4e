"""When things happened to rollouts: what `rollouts time` is made of. No tokens, no texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, and_, or_, select

from tracegrad.events import Json
from tracegrad.genai_attributes import OF_TOOLS
from tracegrad.protocol import REWARD_SPAN, SANDBOX_SPAN
from tracegrad.store.expressions import MAIN_REWARD_NAME
from tracegrad.store.filters import RolloutFilter
from tracegrad.store.models import Leases, Rewards, Rollouts, Spans, Turns
from tracegrad.store.rows import rows_of_keys
from tracegrad.store.types import COMPOSED_SOURCE

# The dialect of turns that spans reported: `created_at` is their beginning, of all others the end.
SPAN_DIALECT = "otel"


class TurnMoment(NamedTuple):
    """A call: `timing` as `events.Turn` has it."""

    turn_id: str
    created_at: float
    timing: Json | None
    from_span: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMoments:
    """Seconds since the epoch. `rewarded_at`: when the reward arrived that counts: the last that
    its lease saw, and where there is none the last; None also where it was taken back.
    `leased_at`: by the lease that it was trained under. `consumed_at`: when the step was committed
    that took it; None for a rollout that no step took. `sandbox_until`: when its sandbox was there,
    and `scored_from`: when what scores it began; None: no runner of ours said."""

    rollout_id: str
    opened_at: float
    finished_at: float | None = None
    rewarded_at: float | None = None
    leased_at: float | None = None
    consumed_at: float | None = None
    sandbox_until: float | None = None
    scored_from: float | None = None
    turns: Sequence[TurnMoment] = ()  # in order of capture
    tools: Sequence[tuple[float, float]] = ()  # beginnings and ends of spans of tools


class _Reward(NamedTuple):
    seq: int
    value: float | None
    created_at: float
    source: str


_REWARD = (*(Rewards.rollout_id, Rewards.seq, Rewards.value, Rewards.created_at, Rewards.source),)


class _Lease(NamedTuple):
    leased_at: float | None
    newest_reward: int | None


def find_moments(
    connection: Connection, wanted: RolloutFilter, *, limit: int | None
) -> list[RolloutMoments]:
    """Of at most `limit` rollouts, the newest first."""
    query = (
        select(Rollouts.rollout_id)
        .where(wanted.where())
        .order_by(Rollouts.opened_at.desc(), Rollouts.rollout_id.desc())
        .limit(limit)
    )
    return load_moments(connection, list(connection.scalars(query)))


def load_moments(connection: Connection, rollout_ids: Collection[str]) -> list[RolloutMoments]:
    """Of those rollouts that there are, in the order of their ids in `rollout_ids`."""
    turns = _turns(connection, rollout_ids)
    rewards = _rewards(connection, rollout_ids)
    stages = _runner_spans(connection, rollout_ids)
    tools = _tool_spans(connection, rollout_ids)
    lease = and_(Leases.rollout_id == Rollouts.rollout_id, Leases.lease_id == Rollouts.lease_id)
    query = select(
        Rollouts.rollout_id,
        Rollouts.opened_at,
        Rollouts.finished_at,
        Rollouts.consumed_at,
        Rollouts.consumed_step,
        Leases.leased_at,
        Leases.newest_reward,
    ).outerjoin(Leases, lease)
    found: dict[str, RolloutMoments] = {}
    for row in rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids):
        # A lease that nothing came of is no end of the wait.
        trained = row.consumed_step is not None
        taken = _Lease(row.leased_at, row.newest_reward) if trained else _Lease(None, None)
        found[row.rollout_id] = RolloutMoments(
            rollout_id=row.rollout_id,
            opened_at=row.opened_at,
            finished_at=row.finished_at,
            rewarded_at=_rewarded_at(rewards[row.rollout_id], taken),
            leased_at=taken.leased_at,
            consumed_at=row.consumed_at if trained else None,
            sandbox_until=stages.get((row.rollout_id, SANDBOX_SPAN), (None, None))[1],
            scored_from=stages.get((row.rollout_id, REWARD_SPAN), (None, None))[0],
            turns=turns[row.rollout_id],
            tools=tools[row.rollout_id],
        )
    return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]


def _turns(connection: Connection, rollout_ids: Collection[str]) -> dict[str, list[TurnMoment]]:
    found: dict[str, list[TurnMoment]] = {rollout_id: [] for rollout_id in rollout_ids}
    query = select(
        Turns.rollout_id, Turns.turn_id, Turns.created_at, Turns.timing, Turns.dialect
    ).order_by(Turns.seq)
    for row in rows_of_keys(connection, query, Turns.rollout_id, rollout_ids):
        found[row.rollout_id].append(
            TurnMoment(row.turn_id, row.created_at, row.timing, row.dialect == SPAN_DIALECT)
        )
    return found


def _runner_spans(
    connection: Connection, rollout_ids: Collection[str]
) -> dict[tuple[str, str], tuple[float, float]]:
    """(rollout, span's name) -> its begin and end, in seconds since the epoch."""
    query = select(Spans.rollout_id, Spans.name, Spans.start_ns, Spans.end_ns).where(
        Spans.name.in_([SANDBOX_SPAN, REWARD_SPAN])
    )
    return {
        (row.rollout_id, row.name): (row.start_ns / 1e9, row.end_ns / 1e9)
        for row in rows_of_keys(connection, query, Spans.rollout_id, rollout_ids)
    }


def _tool_spans(
    connection: Connection, rollout_ids: Collection[str]
) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of each, in seconds since the epoch."""
    found: dict[str, list[tuple[float, float]]] = {rollout_id: [] for rollout_id in rollout_ids}
    says = [Spans.attributes[name].as_string() == value for name, value in OF_TOOLS.items()]
    query = select(Spans.rollout_id, Spans.start_ns, Spans.end_ns).where(or_(*says))
    for row in rows_of_keys(connection, query, Spans.rollout_id, rollout_ids):
        found[row.rollout_id].append((row.start_ns / 1e9, row.end_ns / 1e9))
    return found


def _rewards(connection: Connection, rollout_ids: Collection[str]) -> dict[str, list[_Reward]]:
    """For whole rollouts, in order of arrival."""
    found: dict[str, list[_Reward]] = {rollout_id: [] for rollout_id in rollout_ids}
    query = (
        select(*_REWARD)
        .where(Rewards.name == MAIN_REWARD_NAME, Rewards.turn.is_(None))
        .order_by(Rewards.seq)
    )
    for row in rows_of_keys(connection, query, Rewards.rollout_id, rollout_ids):
        found[row.rollout_id].append(_Reward(row.seq, row.value, row.created_at, row.source))
    return found


def _rewarded_at(rewards: Sequence[_Reward], lease: _Lease) -> float | None:
    seen = [
        reward
        for reward in rewards
        if (lease.newest_reward is None or reward.seq <= lease.newest_reward)
        and (
            lease.newest_reward is not None
            or lease.leased_at is None
            or reward.created_at <= lease.leased_at
        )
    ]
    seen = [reward for reward in seen if reward.source == COMPOSED_SOURCE] or seen
    return seen[-1].created_at if seen and seen[-1].value is not None else None
