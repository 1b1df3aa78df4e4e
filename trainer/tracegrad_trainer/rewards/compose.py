"""One reward of many parts: the weighted sum, and what it lacks where it is unknown.

Nothing here depends on the order in which parts arrived: of each name the last event counts, and
the sum is made in one rounding (`math.fsum`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tracegrad.events import Reward, is_reward
from tracegrad.jsonutil import dump_json
from tracegrad.store.types import COMPOSED_SOURCE, RULE_SOURCE, Scoring
from tracegrad_trainer.rewards.config import RewardSettings
from tracegrad_trainer.rewards.result import MAIN

LABEL = "rewards.weights"


@dataclass(frozen=True, slots=True)
class Part:
    """`value` as it was given; `counted`: within its clamp."""

    name: str
    value: float
    counted: float
    weight: float


@dataclass(frozen=True, slots=True)
class Composition:
    """`value` None: the reward is unknown, and `why` says so."""

    value: float | None
    parts: tuple[Part, ...] = ()
    why: str = ""

    def describe(self) -> str:
        """`1 x resolved, 0.25 x -0.1 length`, for people."""
        if self.value is None:
            return self.why
        said = []
        for part in self.parts:
            clamped = "" if part.counted == part.value else f" (given {part.value:g})"
            said.append(f"{part.name} {part.counted:g}{clamped} x {part.weight:g}")
        return " + ".join(said) + (f"; {self.why}" if self.why else "")


def latest_parts(rewards: Iterable[Reward]) -> dict[str, float]:
    """The parts of a rollout, by name: of each the reward for the whole rollout that arrived last,
    unless it took back what was given. The main reward is one as somebody gave it, not as it was
    composed."""
    found: dict[str, float] = {}
    for reward in rewards:
        if reward.turn is not None or reward.source in (COMPOSED_SOURCE, RULE_SOURCE):
            continue
        found.pop(reward.name, None)
        if is_reward(reward.value):
            found[reward.name] = reward.value
    return found


def compose(
    settings: RewardSettings,
    parts: Mapping[str, float],
    scored: Mapping[str, Scoring] | None = None,
) -> Composition:
    """Of the parts of a rollout that every scorer has ended with (`scored`, by name)."""
    weights = settings.weights or _weights_of_all(settings, scored or {})
    weights = {name: weight for name, weight in weights.items() if weight}
    known = {name: weight for name, weight in weights.items() if name in parts}
    missing = sorted(weights.keys() - known.keys() - set(settings.optional))
    if missing:
        return Composition(None, why=f"unknown: {', '.join(missing)}")
    # Terms say how a reply was written; how it went, only the other parts do.
    judged = weights.keys() - set(settings.terms)
    if not known or (judged and judged.isdisjoint(known)):
        return Composition(None, why=f"unknown: {', '.join(sorted(judged or weights)) or 'all'}")
    counted = tuple(
        Part(name, parts[name], _clamped(parts[name], settings.clamp_parts.get(name)), weight)
        for name, weight in sorted(known.items())
    )
    total = math.fsum(part.counted * part.weight for part in counted)
    value = _clamped(total, settings.clamp)
    if not is_reward(value):
        return Composition(None, why=f"the sum is {value:g}: set rewards.clamp")
    return Composition(value, counted, "" if value == total else f"clamped from {total:g}")


def composed_event(
    rollout_id: str, composition: Composition, rewards: Sequence[Reward]
) -> Reward | None:
    """What says so; None: the last one says it already, or nothing was ever known.

    Its id is made of what it says and of the one before it: workers that make the same sum at the
    same time write it once.
    """
    before = [each for each in rewards if each.source == COMPOSED_SOURCE]
    last = before[-1] if before else None
    comment = composition.describe()
    if last is None and composition.value is None:
        return None
    if last is not None and (last.value, last.comment) == (composition.value, comment):
        return None
    if last is not None and last.value is None and composition.value is None:
        return None
    name = [rollout_id, None if last is None else last.reward_id, composition.value, comment]
    return Reward(
        reward_id=hashlib.sha256(f"{LABEL}\n{dump_json(name)}".encode()).hexdigest()[:32],
        rollout_id=rollout_id,
        value=composition.value,
        name=MAIN,
        source=COMPOSED_SOURCE,
        label=LABEL,
        comment=comment,
    )


def _weights_of_all(settings: RewardSettings, scored: Mapping[str, Scoring]) -> dict[str, float]:
    """1 for all that scorers gave; a scorer that gave nothing lacks the part of its own name."""
    found: dict[str, float] = {}
    for name in settings.scorers:
        scoring = scored.get(name)
        parts = scoring.parts if scoring is not None else None
        found |= dict.fromkeys(parts or (name,), 1.0)
    return found


def _clamped(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])
