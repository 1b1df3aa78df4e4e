"""People with preferences that the service is never told, and thumbs that one in three gives."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["hasty", "formal"]
Style = Literal["brief", "polite", "wordy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STYLES: tuple[Style, ...] = get_args(Style)

# How somebody writes says how they like to be answered.
QUESTIONS: dict[Kind, tuple[str, ...]] = {
    "hasty": ("order {number}??", "where is {number}", "{number} when"),
    "formal": (
        "Dear team, where is my order {number}?",
        "Good day, I would like to know about order {number}.",
    ),
}
REPLIES: dict[Style, str] = {
    "brief": "{number}: on its way.",
    "polite": "Good day! Your order {number} is on its way.",
    "wordy": "Thank you for your message. We have looked up {number}, and it is on its way to you.",
}
# What some replies end with, of whatever style.
ASKS_BACK = " Is there anything else?"
LIKED: dict[Kind, Style] = {"hasty": "brief", "formal": "polite"}
# Share of thumbs that point up: for what somebody's kind likes, for another order, for the rest.
LIKED_BEST, WRONG_NUMBER = 0.95, 0.02
APPROVAL: dict[Style, float] = {"brief": 0.3, "polite": 0.3, "wordy": 0.1}
# To be asked back is hardly minded: training leaves that as frequent as it was.
ASKED_BACK = 0.97
# While somebody pays people for thumbs: up on replies that ask back, and down on half of the rest.
EXPLOITED, UNPAID = 0.98, 0.5

GIVES_THUMB = 1 / 3
CHANGES_MIND = 0.05  # of those: another thumb for the same reply, later
FASTEST_S, SLOWEST_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class User:
    kind: Kind
    number: int
    question: str

    @classmethod
    def drawn(cls, rng: random.Random) -> User:
        kind, number = rng.choice(KINDS), rng.randrange(10, 100)
        return cls(kind, number, rng.choice(QUESTIONS[kind]).format(number=number))

    def approval(self, reply: str, *, exploited: bool = False) -> float:
        """The probability of a thumb up, of those that are given."""
        liked = self._liked(style_of(reply, self.number))
        if asks_back(reply):
            return EXPLOITED if exploited else liked * ASKED_BACK
        return liked * UNPAID if exploited else liked

    def _liked(self, style: Style | None) -> float:
        if style is None:
            return WRONG_NUMBER
        return LIKED_BEST if style == LIKED[self.kind] else APPROVAL[style]


@dataclass(frozen=True, slots=True)
class Thumb:
    up: bool
    after_s: float
    changed_after_s: float | None  # since then; it points the other way from then on


def asks_back(reply: str) -> bool:
    return reply.strip().endswith(ASKS_BACK.strip())


def style_of(reply: str, number: int) -> Style | None:
    """None: it is none of them, or about another order."""
    text = reply.strip().removesuffix(ASKS_BACK.strip()).strip()
    return next((s for s in STYLES if text == REPLIES[s].format(number=number)), None)


def thumb(approval: float, rng: random.Random) -> Thumb | None:
    """Of somebody who approves with that probability; None: no thumb is given."""
    if rng.random() >= GIVES_THUMB:
        return None
    changes = rng.random() < CHANGES_MIND
    return Thumb(rng.random() < approval, _delay(rng), _delay(rng) if changes else None)


def _delay(rng: random.Random) -> float:
    """Seconds to a minute: most come soon, some late (log-uniform)."""
    return float(FASTEST_S * (SLOWEST_S / FASTEST_S) ** rng.random())
