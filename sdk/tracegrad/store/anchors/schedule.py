"""From which turn of an expert's trajectory a task is sampled (IPA, arXiv 2512.24873).

An expert needed K turns. *Anchor* k: the expert's turns before k are replayed in a fresh
environment, the policy samples from turn k on; anchor 0 is the task itself. Where nothing but the
last turn is rewarded, a policy that never gets there learns nothing; from a late anchor it does.

- *rollback*: one anchor, first at the last turn; it moves one turn towards the beginning whenever
  it is mastered, and never back. A share of the rollouts may go over what was mastered (`review`).
- *parallel*: several anchors at once, drawn anew each round, those first that are not mastered.

Nothing here samples, waits or draws from a random state of its own: what is planned depends on
the settings, the task and what was observed, so a run that goes on from JSON plans the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from tracegrad.events import Json

if TYPE_CHECKING:
    from tracegrad.proxy.config import AnchorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorState:
    """Where one task stands. `results` are the latest ones by anchor, at most `window` of each."""

    turns: int  # of the expert
    at: int  # rollback: the anchor that is sampled from
    rounds: int = 0  # planned so far
    results: dict[int, tuple[bool, ...]] = field(default_factory=dict)

    def rate(self, anchor: int) -> float | None:
        """Success among the latest rollouts; None before the first."""
        latest = self.results.get(anchor, ())
        return sum(latest) / len(latest) if latest else None


def start_at_last_turn(turns: int) -> AnchorState:
    """At the expert's last turn. ValueError: the expert had none."""
    if turns < 1:
        raise ValueError(f"turns: {turns}; an expert's trajectory has at least one")
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
        raise ValueError(f"anchor: {anchor}; the expert has turns 0 to {state.turns - 1}")
    if settings.mode == "rollback" and anchor != state.at:
        return state
    latest = (*state.results.get(anchor, ()), *map(bool, successes))[-settings.window :]
    state = replace(state, results=state.results | {anchor: latest})
    if settings.mode == "rollback" and state.at > 0 and is_mastered(state, state.at, settings):
        return replace(state, at=state.at - 1, results={})
    return state


def with_new_demonstration(state: AnchorState, turns: int) -> AnchorState:
    """The state with another expert, who needed `turns`: as far from its end as before, and
    nothing known of its anchors. ValueError: the expert had none."""
    at = turns - (state.turns - state.at)
    return replace(start_at_last_turn(turns), at=max(0, at), rounds=state.rounds)


def as_json(state: AnchorState) -> Json:
    return asdict(state)


def from_json(known: Json) -> AnchorState:
    # JSON's keys are texts, and its sequences lists.
    results = {int(anchor): tuple(each) for anchor, each in known["results"].items()}
    return AnchorState(**{**known, "results": results})
