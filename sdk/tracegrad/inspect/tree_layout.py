"""The turn tree in the form in which it is drawn: chains of turns that branch at their ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tracegrad.events import Turn

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class TurnChain:
    """Turns, by index, of which each continues the one before; then what continues the last.

    Without turns it is the place where samples of one prompt begin, all of them roots.
    """

    turns: list[int]
    branches: list[TurnChain] = field(default_factory=list)


def turn_chains(turns: Sequence[Turn]) -> list[TurnChain]:
    """A branch for each root, in order of capture. Every turn is in exactly one branch.

    A turn whose parent is not among `turns` counts as a root.
    """
    children = children_of(turns)
    roots = [TurnChain([root]) for root in children[None]]
    growing = list(roots)
    while growing:
        branch = growing.pop()
        while len(following := children[branch.turns[-1]]) == 1:
            branch.turns.append(following[0])
        branch.branches = [TurnChain([child]) for child in following]
        growing += branch.branches
    return roots


def children_of(turns: Sequence[Turn]) -> defaultdict[int | None, list[int]]:
    """The turns that continue each turn, and None's: the roots."""
    number = {turn.turn_id: index for index, turn in enumerate(turns)}
    found: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, turn in enumerate(turns):
        found[number.get(turn.parent_id or "")].append(index)
    first: dict[bytes, int] = {}
    for index, turn in enumerate(turns):
        first.setdefault(_prompt(turn), index)
    # Samples of one prompt stand together.
    for siblings in found.values():
        siblings.sort(key=lambda index: first[_prompt(turns[index])])
    return found


def group_samples(roots: Sequence[TurnChain], turns: Sequence[Turn]) -> list[TurnChain]:
    """With a branch of their own for roots that are samples of one prompt."""
    groups: dict[bytes, list[TurnChain]] = {}
    for root in roots:
        groups.setdefault(_prompt(turns[root.turns[0]]), []).append(root)
    return [group[0] if len(group) == 1 else TurnChain([], group) for group in groups.values()]


def _prompt(turn: Turn) -> bytes:
    """Equal for samples of one prompt; a prompt without tokens is equal to none."""
    return turn.prompt_token_ids.tobytes() or turn.turn_id.encode()


def sample_key(turn: Turn) -> tuple[str | None, bytes]:
    """Equal for samples of one prompt that continue the same turn."""
    return turn.parent_id, _prompt(turn)


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    """A turn where it is drawn.

    `guide` leads to it from the left; `first` of its branch: a fork can be explained above it,
    behind `above`.
    """

    turn: int
    guide: str
    above: str
    first: bool


def place_turns(roots: Sequence[TurnChain]) -> Iterator[PlacedTurn]:
    """Every turn once, each under the one that it continues."""
    # (branch, what leads to its first turn, to a word above that, and to all else of it)
    waiting = [(root, "", "", "") for root in reversed(roots)]
    while waiting:
        branch, guide, above, under = waiting.pop()
        for number, turn in enumerate(branch.turns):
            yield PlacedTurn(turn, under if number else guide, above, number == 0)
        placed = enumerate(with_guides(branch.branches, under))
        waiting += reversed(
            [
                (child, to, under + ("│  " if branch.turns or n else ""), below)
                for n, (child, to, below) in placed
            ]
        )


def with_guides(children: Sequence[T], under: str) -> list[tuple[T, str, str]]:
    """Each child with what leads to its first line and to those below it; `under` leads to the
    lines below its parent."""
    last = len(children) - 1
    return [
        (child, under + ("└─ " if n == last else "├─ "), under + ("   " if n == last else "│  "))
        for n, child in enumerate(children)
    ]


def shorten_guide(guide: str, most: int) -> str:
    """The end of a guide that is longer: so deep in a tree only the nearest forks can be seen."""
    step = 3
    kept = max(1, most // step - 1) * step
    return guide if len(guide) <= kept + step else "…  " + guide[-kept:]
