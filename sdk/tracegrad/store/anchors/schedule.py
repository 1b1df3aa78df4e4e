"""From which turn of a demonstration a task is sampled (IPA, arXiv 2512.24873).

A demonstration has K turns. *Anchor* k: the turns before k are replayed in a fresh environment, and
the policy samples from turn k on; anchor 0 is the task itself. Where nothing but the last turn is
rewarded, a policy that never gets there learns nothing; from a late anchor it does.

- *rollback*: one anchor, first at the last turn; it moves one turn towards the beginning whenever
  it is mastered, and never back. A share of the rollouts may go over what was mastered (`review`).
- *parallel*: several anchors at once, drawn again each round, those first that are not mastered.

Nothing here samples, waits or draws from a random state of its own: the plan depends on the
settings, the task and what was observed, so a run that resumes from JSON plans the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AnchorSettings(BaseModel):
    """Which anchors are sampled, and when one is mastered (`[proxy.anchors]`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["rollback", "parallel"] = Field(
        "rollback", description="one anchor that moves towards the beginning, or several at once"
    )
    success: float = Field(1.0, description="reward from which a rollout is a success")
    threshold: float = Field(0.75, gt=0, le=1, description="success rate of a mastered anchor")
    window: int = Field(16, ge=1, description="latest rollouts of an anchor that its rate is of")
    group_size: int = Field(
        8,
        ge=1,
        description="rollouts in a row from one anchor: those are compared with each other;"
        " `trainer serve` takes batches.group_size",
    )
    groups: int = Field(2, ge=1, description="groups of a round, shared by its anchors")
    at_once: int = Field(2, ge=1, description="parallel: anchors of a task in one round")
    review: float = Field(
        0.0, ge=0, lt=1, description="rollback: share of groups from a later, mastered anchor"
    )
    refresh: int | None = Field(
        None,
        ge=1,
        description="scored rollouts after which the best success since is the new"
        " demonstration, if it needed no more turns; none: the first one stays",
    )
    seed: int = Field(0, description="of what is drawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorState:
    """The state of one task. `results` are the latest ones by anchor, at most `window` of each."""

    turns: int  # of the demonstration
    at: int  # rollback: the anchor that is sampled from
    rounds: int = 0  # planned so far
    results: dict[int, tuple[bool, ...]] = field(default_factory=dict)

    def rate(self, anchor: int) -> float | None:
        """Success among the latest rollouts; None before the first."""
        latest = self.results.get(anchor, ())
        return sum(latest) / len(latest) if latest else None


def start_at_last_turn(turns: int) -> AnchorState:
    """At the demonstration's last turn. ValueError: it has none."""
    if turns < 1:
        raise ValueError(f"turns: {turns}; a demonstration has at least one")
    return AnchorState(turns=turns, at=turns - 1)


def is_mastered(state: AnchorState, anchor: int, settings: AnchorSettings) -> bool:
    """Whether a whole window of rollouts from there is successful enough."""
    latest = state.results.get(anchor, ())
    return len(latest) == settings.window and sum(latest) >= settings.threshold * len(latest)


def plan(
    state: AnchorState, budget: int, settings: AnchorSettings, *, task: str = ""
) -> tuple[dict[int, int], AnchorState]:
    """How many rollouts to sample from which anchors: `budget` in all. And the state after.

    Parallel shares the budget out evenly; what is left over goes to the anchors drawn first.
    """
    if budget < 1:
        raise ValueError(f"budget: {budget}; plan at least one rollout")
    after = replace(state, rounds=state.rounds + 1)
    if settings.mode == "rollback":
        again = int(budget * settings.review)
        if not again or state.at == state.turns - 1:
            return {state.at: budget}, after
        # So that turns learnt first are not forgotten: from there on nothing would succeed.
        rng = random.Random(f"{settings.seed} {task} {state.rounds}")
        return {state.at: budget - again, rng.randrange(state.at + 1, state.turns): again}, after
    drawn = _draw(state, min(settings.at_once, state.turns, budget), settings, task)
    each, over = divmod(budget, len(drawn))
    return {anchor: each + (i < over) for i, anchor in enumerate(drawn)}, after


def _draw(state: AnchorState, count: int, settings: AnchorSettings, task: str) -> list[int]:
    rng = random.Random(f"{settings.seed} {task} {state.rounds}")
    order = rng.sample(range(state.turns), state.turns)
    order.sort(key=lambda anchor: is_mastered(state, anchor, settings))
    return order[:count]


def observe(
    state: AnchorState, anchor: int, successes: Sequence[bool], settings: AnchorSettings
) -> AnchorState:
    """The state after rollouts from `anchor` ended, in the order in which they did.

    Rollback counts only what was sampled from where it stands: a rollout that was on its way when
    the anchor moved says nothing of the new one.
    """
    if not 0 <= anchor < state.turns:
        raise ValueError(f"anchor: {anchor}; the demonstration has turns 0 to {state.turns - 1}")
    if settings.mode == "rollback" and anchor != state.at:
        return state
    latest = (*state.results.get(anchor, ()), *map(bool, successes))[-settings.window :]
    state = replace(state, results=state.results | {anchor: latest})
    if settings.mode == "rollback" and state.at > 0 and is_mastered(state, state.at, settings):
        return replace(state, at=state.at - 1, results={})
    return state


def with_new_demonstration(state: AnchorState, turns: int) -> AnchorState:
    """The state with another demonstration, of `turns`: as far from its end as before, and
    nothing known of its anchors. ValueError: it has none."""
    at = turns - (state.turns - state.at)
    return replace(start_at_last_turn(turns), at=max(0, at), rounds=state.rounds)
