"""Rollouts with all that training needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, select

from tracegrad.records import Outcome, RewardGiven
from tracegrad.store.queries import rewards_of, tags_of
from tracegrad.store.reading import turns_of
from tracegrad.store.schema import Rollouts
from tracegrad.store.sql import MAIN_REWARD, chunks
from tracegrad.store.views import RolloutSample


def samples_of(
    connection: Connection, rewards: Mapping[str, float], *, routes: bool = True
) -> dict[str, RolloutSample]:
    """Finished rollouts, by id, with the rewards given here; those that are gone are left out.

    `routes` asks for the turns' routed experts.
    """
    ids = list(rewards)
    samples = {}
    turns = turns_of(connection, ids, raw=False, routes=routes)
    events = rewards_of(connection, ids)
    tags = tags_of(connection, ids)
    for some in chunks(ids):
        query = select(
            Rollouts.rollout_id, Rollouts.task_id, Rollouts.agent, Rollouts.outcome
        ).where(Rollouts.rollout_id.in_(some))
        for rollout_id, task_id, agent, outcome in connection.execute(query):
            assert outcome is not None, "only finished rollouts are trained on"
            samples[rollout_id] = RolloutSample(
                rollout_id=rollout_id,
                task_id=task_id,
                agent=agent,
                tags=tags[rollout_id],
                outcome=Outcome(outcome),
                reward=rewards[rollout_id],
                turn_rewards=turn_rewards(events[rollout_id], len(turns[rollout_id])),
                turns=turns[rollout_id],
            )
    return samples


def turn_rewards(events: Iterable[RewardGiven], turns: int) -> dict[int, float]:
    """Each turn's latest reward named "reward"; events for turns that are not there fall away.

    `events` come in order of arrival, which decides between equal times.
    """
    latest: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event.created_at):
        if event.name != MAIN_REWARD or event.turn is None:
            continue
        index = event.turn if event.turn >= 0 else turns + event.turn
        if 0 <= index < turns:
            latest[index] = event.value
    return latest
