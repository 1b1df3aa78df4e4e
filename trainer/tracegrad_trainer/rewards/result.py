"""What a scorer may answer with: a number, a reward, parts by name, or that it cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tracegrad.events import REWARD_RANGE, Json, Reward, is_reward

# Names of parts that are not of the user's choice. Of the counting reward; as a part, what somebody
# gave under that name.
MAIN = "reward"
LENGTH, FORMAT, JUDGE = "length", "format", "judge"


class NoScore(ValueError):
    """A scorer answered with something that is no reward; asking again would not help."""


@dataclass(frozen=True, slots=True)
class Score:
    """`parts` by name, None where one is unknown; no parts at all: the scorer cannot tell."""

    parts: Mapping[str, float | None]
    comments: Mapping[str, str]

    @property
    def is_known(self) -> bool:
        return any(value is not None for value in self.parts.values())

    def as_json(self) -> Json:
        return {"parts": dict(self.parts), "comments": dict(self.comments)}

    @classmethod
    def from_json(cls, given: Json) -> Score:
        """As another process wrote it. Raises NoScore."""
        parts = {str(name): number(str(name), value) for name, value in given["parts"].items()}
        return cls(parts, {str(name): str(text) for name, text in given["comments"].items()})


def read_score(scorer: str, given: Any) -> Score:
    """Raises NoScore: it is none."""
    if given is None:
        return Score({}, {})
    if isinstance(given, Reward):
        name = scorer if given.name == MAIN else given.name
        if given.turn is not None:
            raise NoScore(f"{scorer} gave a reward of turn {given.turn}; give one of the rollout")
        comments = {} if given.comment is None else {name: given.comment}
        return Score({name: number(name, given.value)}, comments)
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str) or not name or name == MAIN:
                raise NoScore(f"{scorer} gave a part named {name!r}; give it another name")
        return Score({name: number(name, value) for name, value in given.items()}, {})
    return Score({scorer: number(scorer, given)}, {})


def number(name: str, value: Any) -> float | None:
    """Also of a NumPy scalar, a tensor of one number, or a truth. Raises NoScore."""
    if value is None:
        return None
    try:
        if not isinstance(value, Real) and not hasattr(value, "__float__"):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise NoScore(
            f"{name} gave {value!r:.60} ({type(value).__name__}), which is no number"
        ) from None
    if not is_reward(found):
        raise NoScore(f"{name} gave {found}; give {REWARD_RANGE}")
    return found
