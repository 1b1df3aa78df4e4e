"""The turn tree; the proxy, the store and the trainer share it.

The prefix rule: a turn's parent is the recorded turn with the longest `prompt + completion`
that the turn's prompt begins with, token for token. Turns without a parent are roots; a path
runs from a root to a leaf. Nothing here looks at text: equal tokens are the only proof.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class HasTokens(Protocol):
    @property
    def prompt_token_ids(self) -> array[int]: ...
    @property
    def completion_token_ids(self) -> array[int]: ...


class HasParent(HasTokens, Protocol):
    @property
    def turn_id(self) -> str: ...
    @property
    def parent_id(self) -> str | None: ...


class Sliceable(Protocol):
    """A text, a list, a token array of the standard library's or of NumPy."""

    def __len__(self) -> int: ...
    def __getitem__(self, items: Any, /) -> Any: ...


T = TypeVar("T", bound=HasTokens)
P = TypeVar("P", bound=HasParent)


def common_prefix(a: Sliceable, b: Sliceable) -> int:
    """How many items both begin with; compared in C."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:  # of many branches most differ at once
        return 0
    same = a[:length] == b[:length]
    if not isinstance(same, bool):  # NumPy compares item by item
        return length if same.all() else int(same.argmin())
    low, high = length if same else 1, length
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def extends(prompt: array[int], turn: HasTokens) -> bool:
    """Whether `prompt` begins with the turn's prompt followed by its completion."""
    middle = len(turn.prompt_token_ids)
    end = middle + len(turn.completion_token_ids)
    return (
        len(prompt) >= end
        # The completion first: it is short, and it is where siblings differ.
        and prompt[middle:end] == turn.completion_token_ids
        and prompt[:middle] == turn.prompt_token_ids
    )


def find_parent(prompt: array[int], turns: Iterable[T]) -> T | None:
    """The turn that `prompt` continues: the longest one, the latest among equals."""
    best: T | None = None
    best_length = -1
    for turn in turns:
        length = len(turn.prompt_token_ids) + len(turn.completion_token_ids)
        if length >= best_length and extends(prompt, turn):
            best, best_length = turn, length
    return best


class TokenDigests(NamedTuple):
    """Equal tokens have equal ones."""

    prompt: bytes
    whole: bytes  # the prompt and the completion


@dataclass(frozen=True, eq=False)
class TurnTree(Generic[P]):
    """A rollout's turns as a tree: derived once, and handed on.

    Places count the turns in order of capture. A turn whose parent is not among them is a root.
    """

    turns: tuple[P, ...]
    places: Mapping[str, int]  # by turn id
    parents: tuple[int, ...]  # the place of the turn that each one continues; -1: a root

    @classmethod
    def of(cls, turns: Iterable[P]) -> TurnTree[P]:
        turns = tuple(turns)
        places = {turn.turn_id: place for place, turn in enumerate(turns)}
        parents = tuple(places.get(turn.parent_id or "", -1) for turn in turns)
        return cls(turns, places, parents)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Turns that no other one continues."""
        inner = set(self.parents)
        return tuple(place for place in range(len(self.turns)) if place not in inner)

    def paths(self) -> Iterator[tuple[P, ...]]:
        """Every root-to-leaf path, in the order of the leaves; one at a time, since all paths of a
        tree that forks at each turn hold the square of its turns."""
        return map(self.path, self.leaves)

    def path(self, leaf: int) -> tuple[P, ...]:
        """From the root to the turn at this place."""
        path = [self.turns[leaf]]
        for place in self.ancestors(leaf):
            path.append(self.turns[place])
            assert len(path) <= len(self.turns), "a turn is not its own ancestor"
        return tuple(reversed(path))

    def ancestors(self, place: int) -> Iterator[int]:
        """The turns that the one at `place` continues, the nearest first."""
        while (place := self.parents[place]) >= 0:
            yield place

    def without(self, skipped: Collection[str]) -> TurnTree[P]:
        """The tree of the turns that are not skipped (ids), and of those that they continue."""
        needed: set[int] = set()
        for place, turn in enumerate(self.turns):
            if turn.turn_id not in skipped and place not in needed:
                needed.add(place)
                for above in self.ancestors(place):
                    if above in needed:
                        break
                    needed.add(above)
        if len(needed) == len(self.turns):
            return self
        return TurnTree.of(turn for place, turn in enumerate(self.turns) if place in needed)

    @cached_property
    def digests(self) -> tuple[TokenDigests, ...]:
        """One a turn. Where the turn that it continues came before it, only what is new is read:
        a conversation is hashed once, not once a turn."""
        known: list[hashlib.blake2b] = []
        found = []
        for place, (turn, parent) in enumerate(zip(self.turns, self.parents, strict=True)):
            read, prompt = 0, hashlib.blake2b(digest_size=16)
            if 0 <= parent < place:
                before = self.turns[parent]
                read = len(before.prompt_token_ids) + len(before.completion_token_ids)
                prompt = known[parent].copy()
            prompt.update(memoryview(turn.prompt_token_ids)[read:])
            whole = prompt.copy()
            whole.update(turn.completion_token_ids)
            known.append(whole)
            found.append(TokenDigests(prompt.digest(), whole.digest()))
        return tuple(found)


def paths(turns: Iterable[P]) -> Iterator[tuple[P, ...]]:
    """Every root-to-leaf path, where nothing else is asked of the tree."""
    return TurnTree.of(turns).paths()
