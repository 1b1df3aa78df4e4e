"""What became of a turn, which rewards are its own, and which of them count: as the command line
and the web page say it."""

from __future__ import annotations

from typing import Literal

from tracegrad.events import Reward, Turn
from tracegrad.inspect.display_text import one_line, training_text
from tracegrad.inspect.reasons import untrained_reason
from tracegrad.store import RolloutDetail
from tracegrad.store.read.training_samples import agent_turn_indices, turn_of_reward
from tracegrad.store.types import COMPOSED_SOURCE

Fate = Literal["trained", "waiting", "untrained"]


def versions_text(turn: Turn) -> str:
    spans = [(version, amount) for version, amount in turn.policy_versions if amount]
    if len(spans) == 1:
        return f"version {spans[0][0]}"
    return ", ".join(f"{amount} by version {version}" for version, amount in spans)


def disposition_text(turn: Turn, detail: RolloutDetail) -> tuple[str, Fate]:
    """What became of the turn, and of which kind that is."""
    fate = detail.dispositions.get(turn.turn_id)
    missing = untrained_reason(turn, detail)
    if missing is None:
        return f"trained in step {fate.step if fate else None}", "trained"
    if not missing.final:
        return f"not trained yet: {training_text(detail.summary)}", "waiting"
    how = "not trained" if fate is not None or not turn.untrainable else "not trainable"
    return f"{how}: {one_line(missing.reason)}", "untrained"


def rewards_of_turn(index: int, detail: RolloutDetail) -> list[Reward]:
    """Given for this turn, in order of arrival."""
    known = agent_turn_indices(detail.turns)
    return [r for r in detail.rewards if turn_of_reward(r, known) == index]


def late_by(detail: RolloutDetail) -> str:
    """When a late reward came, in words."""
    row = detail.summary
    if row.state != "consumed":
        return "while it was being trained"
    if row.consumed_step is None:
        return "after its turns were skipped"
    return f"after step {row.consumed_step}"


def is_latest_reward(reward: Reward, detail: RolloutDetail, *, in_time: bool = False) -> bool:
    """Of all that have its name and turn; `in_time`: of those that training could take. A composed
    one revises those before it, and none that somebody gave: these are parts of it."""
    turns = len(agent_turn_indices(detail.turns))

    def given_for(each: Reward) -> tuple[str, int | None, bool]:
        behind = each.turn is not None and each.turn < 0
        turn = each.turn + turns if behind and each.turn is not None else each.turn
        return each.name, turn, each.source == COMPOSED_SOURCE

    # The last in arrival, as the ledger has it.
    same = [each for each in detail.rewards if given_for(each) == given_for(reward)]
    if in_time:
        same = [each for each in same if not detail.came_late(each)]
        return detail.rewards_taken and same[-1:] == [reward]
    return same[-1] is reward
