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
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from tracegrad.records import Json


class AnchorSettings(BaseModel):
    """How anchors are chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["rollback", "parallel"] = "rollback"
    threshold: float = Field(0.75, gt=0, le=1, description="success rate of a mastered anchor")
    window: int = Field(16, ge=1, description="latest rollouts of an anchor that its rate is of")
    at_once: int = Field(2, ge=1, description="parallel: anchors of a task in one round")
    review: float = Field(
        0.0, ge=0, lt=1, description="rollback: share of rollouts from a later, mastered anchor"
    )
    seed: int = Field(0, description="of what is drawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Where one task stands. `results` are the latest ones by anchor, at most `window` of each."""

    turns: int  # of the expert
    at: int  # rollback: the anchor that is sampled from
    rounds: int = 0  # planned so far
    results: dict[int, tuple[bool, ...]] = field(default_factory=dict)

    def rate(self, anchor: int) -> float | None:
        """Success among the latest rollouts; None before the first."""
        latest = self.results.get(anchor, ())
        return sum(latest) / len(latest) if latest else None


def begin(turns: int) -> Anchors:
    """At the expert's last turn. ValueError: the expert had none."""
    if turns < 1:
        raise ValueError(f"turns: {turns}; an expert's trajectory has at least one")
    return Anchors(turns=turns, at=turns - 1)


def mastered(state: Anchors, anchor: int, settings: AnchorSettings) -> bool:
    """Whether a whole window of rollouts from there is successful enough."""
    latest = state.results.get(anchor, ())
    return len(latest) == settings.window and sum(latest) >= settings.threshold * len(latest)


def plan(
    state: Anchors, budget: int, settings: AnchorSettings, *, task: str = ""
) -> tuple[dict[int, int], Anchors]:
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


def _draw(state: Anchors, count: int, settings: AnchorSettings, task: str) -> list[int]:
    rng = random.Random(f"{settings.seed} {task} {state.rounds}")
    order = rng.sample(range(state.turns), state.turns)
    order.sort(key=lambda anchor: mastered(state, anchor, settings))
    return order[:count]


def observe(
    state: Anchors, anchor: int, successes: Sequence[bool], settings: AnchorSettings
) -> Anchors:
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
    if settings.mode == "rollback" and state.at > 0 and mastered(state, state.at, settings):
        return replace(state, at=state.at - 1, results={})
    return state


class Schedule:
    """The anchors of all tasks of a run."""

    def __init__(self, settings: AnchorSettings) -> None:
        self.settings = settings
        self.tasks: dict[str, Anchors] = {}

    def add(self, task: str, turns: int) -> None:
        """A task whose expert needed `turns`; one that is known stays where it is.

        ValueError: it is known with an expert of another length.
        """
        known = self.tasks.setdefault(task, begin(turns))
        if known.turns != turns:
            raise ValueError(
                f"task {task}: its expert had {known.turns} turns, now {turns};"
                " give a changed expert a task id of its own"
            )

    def plan(self, task: str, budget: int) -> dict[int, int]:
        """Rollouts by anchor for the task's next round, `budget` in all."""
        quotas, self.tasks[task] = plan(self.tasks[task], budget, self.settings, task=task)
        return quotas

    def observe(self, task: str, anchor: int, successes: Sequence[bool]) -> None:
        self.tasks[task] = observe(self.tasks[task], anchor, successes, self.settings)

    def mastered(self, task: str) -> bool:
        """Whether the task is solved from its beginning."""
        return mastered(self.tasks[task], 0, self.settings)

    def as_json(self) -> Json:
        return {task: asdict(state) for task, state in self.tasks.items()}

    @classmethod
    def from_json(cls, settings: AnchorSettings, known: Json) -> Self:
        schedule = cls(settings)
        for task, state in known.items():
            # JSON's keys are texts, and its sequences lists.
            results = {int(anchor): tuple(each) for anchor, each in state["results"].items()}
            schedule.tasks[task] = Anchors(**{**state, "results": results})
        return schedule
