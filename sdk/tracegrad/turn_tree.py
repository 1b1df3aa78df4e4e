"""The turn tree as pure functions; the proxy, the store and the trainer share them.

The prefix rule: a turn's parent is the recorded turn with the longest `prompt + completion`
that the turn's prompt begins with, token for token. Turns without a parent are roots; a path
runs from a root to a leaf. Nothing here looks at text: equal tokens are the only proof.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar


class HasTokens(Protocol):
    @property
    def prompt_token_ids(self) -> array[int]: ...
    @property
    def completion_token_ids(self) -> array[int]: ...


class HasParent(Protocol):
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


def paths(turns: Sequence[P]) -> Iterator[list[P]]:
    """Every root-to-leaf path, in the order of the leaves in `turns`.

    A turn whose parent is not among `turns` counts as a root.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    inner = {turn.parent_id for turn in turns if turn.parent_id is not None}
    for leaf in turns:
        if leaf.turn_id in inner:
            continue
        path = [leaf]
        while (parent_id := path[-1].parent_id) is not None and parent_id in by_id:
            path.append(by_id[parent_id])
            assert len(path) <= len(turns), "a turn is not its own ancestor"
        yield path[::-1]


def with_ancestors(turns: Sequence[P], skipped: Collection[str]) -> list[P]:
    """The turns that are not skipped (ids), and those that they continue."""
    by_id = {turn.turn_id: turn for turn in turns}
    needed: set[str] = set()
    for turn in turns:
        current = None if turn.turn_id in skipped else turn
        while current is not None and current.turn_id not in needed:
            needed.add(current.turn_id)
            current = by_id.get(current.parent_id or "")
    return [turn for turn in turns if turn.turn_id in needed]
