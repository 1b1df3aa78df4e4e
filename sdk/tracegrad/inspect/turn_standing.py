"""What became of a turn, which rewards are its own, and which of them count: as the command line
and the web page say it."""

from __future__ import annotations

from typing import Literal

from tracegrad.events import Reward, Turn, is_reward
from tracegrad.inspect.display_text import one_line, training_text
from tracegrad.inspect.reasons import untrained_reason
from tracegrad.store import RolloutDetail
from tracegrad.store.expressions import MAIN_REWARD_NAME
from tracegrad.store.read.training_samples import agent_turn_indices, turn_of_reward
from tracegrad.store.types import COMPOSED_SOURCE, TurnDisposition

DispositionKind = Literal["trained", "waiting", "untrained"]


def versions_text(turn: Turn) -> str:
    spans = [(version, amount) for version, amount in turn.policy_versions if amount]
    if len(spans) == 1:
        return f"version {spans[0][0]}"
    return ", ".join(f"{amount} by version {version}" for version, amount in spans)


def disposition_text(turn: Turn, detail: RolloutDetail) -> tuple[str, DispositionKind]:
    """What became of the turn, and of which kind that is."""
    disposition = detail.dispositions.get(turn.turn_id)
    missing = untrained_reason(turn, detail)
    if missing is None:
        return _trained_text(disposition), "trained"
    if not missing.final:
        return f"not trained yet: {training_text(detail.summary)}", "waiting"
    how = "not trained" if disposition is not None or not turn.untrainable else "not trainable"
    return f"{how}: {one_line(missing.reason)}", "untrained"


def _trained_text(disposition: TurnDisposition | None) -> str:
    text = f"trained in step {disposition.step if disposition else None}"
    if disposition is None or disposition.advantage is None:
        return text
    return f"{text}, advantage {disposition.advantage:+.3g}"


def late_by(detail: RolloutDetail) -> str:
    """When a late reward came, in words."""
    row = detail.summary
    if row.state != "consumed":
        return "while it was being trained"
    if row.consumed_step is None:
        return "after its turns were skipped"
    return f"after step {row.consumed_step}"


class RewardStandings:
    """Which of a rollout's rewards count, found out once for all of them."""

    def __init__(self, detail: RolloutDetail) -> None:
        self._known = agent_turn_indices(detail.turns)
        self._taken = detail.rewards_taken
        # The last in arrival, as the ledger has it.
        self._last: dict[object, Reward] = {}
        self._last_in_time: dict[object, Reward] = {}
        self._by_turn: dict[int | None, list[Reward]] = {}
        for reward in detail.rewards:
            key = self._given_for(reward)
            self._last[key] = reward
            if not detail.came_late(reward):
                self._last_in_time[key] = reward
            self._by_turn.setdefault(self.turn(reward), []).append(reward)
        # What training took, or would take now.
        self._is_composed = any(
            each.source == COMPOSED_SOURCE and self._is_main(each) and not detail.came_late(each)
            for each in detail.rewards
        )

    def turn(self, reward: Reward) -> int | None:
        """The index of the turn that it is for; None: it is for none, or for one that is not
        there."""
        return turn_of_reward(reward, self._known)

    def of_turn(self, index: int | None) -> list[Reward]:
        """Those for a turn, in order of arrival; None's are those of no turn that is there."""
        return self._by_turn.get(index, [])

    def is_latest(self, reward: Reward, *, in_time: bool = False) -> bool:
        """Of all that have its name and turn; `in_time`: of those that training could take. A
        composed one revises those before it, and none that somebody gave: these are parts of it."""
        last = self._last_in_time if in_time else self._last
        return (self._taken or not in_time) and last.get(self._given_for(reward)) is reward

    def counts(self, reward: Reward) -> bool:
        """Whether it is the rollout's reward, or its turn's, as training takes it: the last in
        time, not taken back, and where one was composed none of its parts."""
        if reward.name != MAIN_REWARD_NAME or not is_reward(reward.value):
            return False
        if reward.turn is not None and self.turn(reward) is None:
            return False
        last = self._last_in_time.get(self._given_for(reward))
        return last is reward and not self.is_part(reward)

    def is_part(self, reward: Reward) -> bool:
        """Whether the rollout's reward was composed, and this one is a part of it."""
        return self._is_composed and self._is_main(reward) and reward.source != COMPOSED_SOURCE

    def _is_main(self, reward: Reward) -> bool:
        return reward.name == MAIN_REWARD_NAME and reward.turn is None

    def _given_for(self, each: Reward) -> object:
        behind = each.turn is not None and each.turn < 0
        turn = each.turn + len(self._known) if behind and each.turn is not None else each.turn
        return each.name, turn, each.source == COMPOSED_SOURCE
