"""The tokens of a turn: what was sampled, how likely it was, by which policy version."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tracegrad.inspect.display_text import printable
from tracegrad.inspect.turn_standing import DispositionKind, disposition_text
from tracegrad.store import Store
from tracegrad.store.errors import UnknownRollout
from tracegrad.store.read.rollout_outline import RolloutOutline, rollout_outline, turn_tokens
from tracegrad.ui.paging import WrongLink

PAGE = 2_000  # tokens
# Of a token's id list the text of each; None: no tokenizer is known.
ReadTokens = Callable[[Sequence[int]], list[str]]

COLOURINGS = ("probability", "advantage", "version", "training")
# Least probability of a bucket, and how it is called in the legend. Beyond the last: the rest.
BUCKETS = ((0.9, "90 % or more"), (0.5, "50 %"), (0.2, "20 %"), (0.05, "5 %"), (0.01, "1 %"),
           (0.0, "less"))  # fmt: skip
# As BUCKETS, of advantages: the least of each; 0 is one of its own.
CREDITS = ((1.0, "1 or more"), (0.0, "above 0"), (-1.0, "below 0"), (-math.inf, "below −1"))
_ROUNDING = 1e-9  # of a mean
_VERSION_COLOURS = 6


class ShownToken(NamedTuple):
    """`text` is the id where no tokenizer is known. `classes` say its colours."""

    text: str
    classes: str
    title: str
    breaks: bool  # a line ends behind it


@dataclass(frozen=True, slots=True)
class TokensView:
    number: int
    tokens: list[ShownToken]
    first: int
    total: int
    prompt: int
    mean_logprob: float | None
    versions: list[tuple[int, int]]  # version, its colour
    disposition: str
    kind: DispositionKind
    has_text: bool
    advantage: float | None  # of all its tokens

    @property
    def part(self) -> str:
        """Which of the turn's tokens these are; empty: all."""
        end = self.first + len(self.tokens)
        if end - self.first == self.total:
            return ""
        if not self.first:
            return f"The first {end:,} of {self.total:,} tokens."
        return f"Tokens {self.first:,} to {end - 1:,} of {self.total:,}."

    @property
    def later(self) -> int | None:
        """The first token of the next page."""
        end = self.first + len(self.tokens)
        return end if end < self.total else None


def tokens_view(
    store: Store, rollout_id: str, number: int, first: int, read: ReadTokens | None
) -> TokensView:
    """Raises UnknownRollout where there is no such turn."""
    with store.reading() as connection:
        outline = rollout_outline(connection, rollout_id)
        if not 0 <= number < len(outline.detail.turns):
            raise UnknownRollout(f"rollout {rollout_id} has no turn {number}")
        found = turn_tokens(connection, outline.detail.turns[number].turn_id)
    if found is None:
        raise UnknownRollout(f"turn {number} was removed meanwhile")
    return view_of(outline, number, found.sampled, found.logprobs, first, read)


def view_of(
    outline: RolloutOutline,
    number: int,
    sampled: Sequence[int],
    logprobs: Sequence[float],
    first: int,
    read: ReadTokens | None,
    most: int = PAGE,
) -> TokensView:
    """Of a turn with these tokens: those from `first` on, at most so many."""
    size = outline.sizes[number]
    turn = outline.detail.turns[number]
    disposition, kind = disposition_text(turn, outline.detail)
    ledger = outline.detail.dispositions.get(turn.turn_id)
    advantage = ledger.advantage if ledger is not None else None
    by_version = [version for version, count in size.versions for _ in range(count)]
    known = sorted(set(by_version))
    colours = {version: n % _VERSION_COLOURS for n, version in enumerate(known)}
    first = max(0, min(first, len(sampled)))
    chosen = range(first, min(first + most, len(sampled)))
    texts = read(sampled[first : chosen.stop]) if read is not None else None
    tokens = [
        _token(
            sampled[at],
            logprobs[at],
            texts[at - first] if texts is not None else None,
            (by_version[at], colours[by_version[at]]) if at < len(by_version) else None,
            f"k-{kind} {credit_class(advantage)}",
            disposition,
        )
        for at in chosen
    ]
    return TokensView(
        number=number,
        tokens=tokens,
        first=first,
        total=len(sampled),
        prompt=size.prompt,
        mean_logprob=math.fsum(logprobs) / len(logprobs) if len(logprobs) else None,
        versions=[(version, colours[version]) for version in known],
        disposition=disposition,
        kind=kind,
        has_text=texts is not None,
        advantage=advantage,
    )


def credit_class(advantage: float | None) -> str:
    """The colour of an advantage: a0 to a3 as CREDITS, `a-zero`; `a-none` where none is known."""
    if advantage is None or math.isnan(advantage):
        return "a-none"
    if abs(advantage) < _ROUNDING:
        return "a-zero"
    return f"a{next(n for n, (least, _) in enumerate(CREDITS) if advantage >= least)}"


def _token(
    token: int,
    logprob: float,
    text: str | None,
    version: tuple[int, int] | None,
    of_turn: str,
    disposition: str,
) -> ShownToken:
    """`of_turn`: classes that all of its tokens have."""
    likely = math.exp(min(logprob, 0.0)) if math.isfinite(logprob) else 0.0
    bucket = next(n for n, (least, _) in enumerate(BUCKETS) if likely >= least)
    said = [f"log-probability {logprob:.3f}", f"probability {likely:.2%}"]
    classes = f"b{bucket} {of_turn}"
    if version is not None:
        said.append(f"version {version[0]}")
        classes += f" v{version[1]}"
    said += [disposition, f"token {token}"]
    shown = str(token) if text is None else _visible(text)
    breaks = text is not None and "\n" in text
    return ShownToken(shown, classes, " · ".join(said), breaks)


def _visible(text: str) -> str:
    """Ends of lines and characters in the making as signs: every token is something to point at."""
    return printable(text).replace("\n", "⏎").replace("\t", "⇥") or "·"


def tokens_values(view: TokensView, by: str) -> dict[str, Any]:
    """What the template needs. WrongLink: `by` is no colouring."""
    if by not in COLOURINGS:
        raise WrongLink(f"by: {by[:40]!r}; use {', '.join(COLOURINGS)}")
    return {
        "view": view,
        "by": by,
        "colourings": COLOURINGS,
        "buckets": BUCKETS,
        "credits": CREDITS,
    }
