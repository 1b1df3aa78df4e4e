"""Rollouts with all that training needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection, select

from tracegrad.events import UNACKNOWLEDGED, Outcome, Reward, Turn, is_reward
from tracegrad.store.expressions import MAIN_REWARD_NAME
from tracegrad.store.models import Rollouts
from tracegrad.store.read.rollouts import load_rewards, load_tags
from tracegrad.store.read.turns import load_turns
from tracegrad.store.rows import rows_of_keys
from tracegrad.store.types import RolloutSample

# The name of a reward that marks the turn which decided the outcome.
DECIDING_LABEL = "deciding"


def load_samples(
    connection: Connection,
    rewards: Mapping[str, float],
    *,
    newest: Mapping[str, int] | None = None,
    expert_routing: bool = True,
) -> dict[str, RolloutSample]:
    """Finished rollouts, by id, with the rewards given here; those that are gone are left out.

    `newest`: the number of each one's newest reward that counts (`Rewards.seq`); None: all do.
    `expert_routing` asks for the turns' routed experts.
    """
    ids = list(rewards)
    samples = {}
    turns = load_turns(connection, ids, raw=False, expert_routing=expert_routing)
    events = load_rewards(connection, ids, newest=newest)
    tags = load_tags(connection, ids)
    query = select(Rollouts.rollout_id, Rollouts.task_id, Rollouts.agent, Rollouts.outcome)
    for rollout_id, task_id, agent, outcome in rows_of_keys(
        connection, query, Rollouts.rollout_id, ids
    ):
        samples[rollout_id] = RolloutSample(
            rollout_id=rollout_id,
            task_id=task_id,
            agent=agent,
            tags=tags[rollout_id],
            # One that is only about to be closed (`Ledger.preview`) has none yet.
            outcome=Outcome(outcome or Outcome.COMPLETED),
            reward=rewards[rollout_id],
            turn_rewards=turn_rewards(events[rollout_id], turns[rollout_id]),
            turns=turns[rollout_id],
            deciding_turn=deciding_turn(events[rollout_id], turns[rollout_id]),
        )
    return samples


def deciding_turn(events: Iterable[Reward], turns: Sequence[Turn]) -> int | None:
    """The index of the turn that is marked as the one that decided the outcome, of several the
    last."""
    marks = turn_rewards(events, turns, name=DECIDING_LABEL)
    return max((index for index, value in marks.items() if value > 0), default=None)


def turn_rewards(
    events: Iterable[Reward], turns: Sequence[Turn], *, name: str = MAIN_REWARD_NAME
) -> dict[int, float]:
    """By index in `turns`, its latest reward of that name, unless it was taken back; events for
    turns that are not there fall away.

    `events` come in order of arrival. They count the turns that their giver knows of: a call that
    was refused and made again is one.
    """
    known = agent_turn_indices(turns)
    latest: dict[int, float] = {}
    for event in events:
        index = turn_of_reward(event, known)
        if event.name != name or index is None:
            continue
        if event.value is None:
            latest.pop(index, None)
        elif is_reward(event.value):
            latest[index] = event.value
    return latest


def turn_of_reward(reward: Reward, known: Sequence[int]) -> int | None:
    """The index of the turn that it is for; None: it is for none, or for one that is not there.
    `known`: `agent_turn_indices` of the rollout's turns."""
    if reward.turn is None or not -len(known) <= reward.turn < len(known):
        return None
    return known[reward.turn]


def agent_turn_indices(turns: Sequence[Turn]) -> list[int]:
    """The indices of the turns that `reward(turn=k)` counts."""
    return [i for i, turn in enumerate(turns) if turn.untrainable != UNACKNOWLEDGED]
