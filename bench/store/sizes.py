"""Bytes on the disk for a token that no earlier turn has; ids and log-probabilities both count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.store.places import Place
from bench.store.rollouts import AGENT, Shape, instructions, rollout
from tracegrad.jsonutil import dump_json
from tracegrad.store import Store

# What rollouts have in common is stored once: here they have nothing.
_ALL_DIFFER = 1 << 30
# Before them, so that the first page of every table and index is there.
_FIRST = 8


@dataclass(frozen=True, slots=True)
class Size:
    """Of `turns` turns: how much the database grew with their text, and without."""

    place: str
    shape: Shape
    turns: int
    tokens: int
    bytes_without_text: int
    bytes_with_text: int

    @property
    def per_token(self) -> float:
        return self.bytes_without_text / self.tokens


def size(place: Place, shape: Shape, rollouts: int) -> Size:
    without, with_text = (_growth(place, shape, rollouts, texts=texts) for texts in (False, True))
    return Size(
        place.name,
        shape,
        rollouts * shape.turns,
        rollouts * shape.unique_tokens,
        without,
        with_text,
    )


@dataclass(frozen=True, slots=True)
class Common:
    """Bytes a rollout with its text, of an agent that says so many bytes with each call: where
    these are other ones in each rollout, and where they are the same."""

    place: str
    shape: Shape
    rollouts: int
    said: int
    bytes_other: float
    bytes_same: float


def common(place: Place, rollouts: int) -> Common:
    other, same = (_growth_in_common(place, rollouts, same=same) for same in (False, True))
    said = len(dump_json(instructions("0")))
    return Common(place.name, AGENT, rollouts, said, other / rollouts, same / rollouts)


def _growth_in_common(place: Place, rollouts: int, *, same: bool) -> int:
    def write(store: Store, number: int) -> None:
        said = instructions("0" if same else str(number))
        made = rollout(AGENT, number, scripts=_ALL_DIFFER, common=said)
        store.append([made.opened])
        for turn in made.turns:
            store.append([turn])

    return _grown(place, rollouts, write)


def _growth(place: Place, shape: Shape, rollouts: int, *, texts: bool) -> int:
    return _grown(place, rollouts, lambda store, n: _write(store, shape, n, texts=texts))


def _grown(place: Place, rollouts: int, write: Callable[[Store, int], None]) -> int:
    url = place.new_url()
    try:
        with Store.open(url) as store:
            for number in range(_FIRST):
                write(store, number)
            before = place.size(url)
            for number in range(rollouts):
                write(store, _FIRST + number)
            return place.size(url) - before
    finally:
        place.drop(url)


def _write(store: Store, shape: Shape, number: int, *, texts: bool) -> None:
    """A turn a transaction: what is kept of earlier ones is then what it is in use."""
    made = rollout(shape, number, texts=texts, scripts=_ALL_DIFFER)
    store.append([made.opened])
    for turn in made.turns:
        store.append([turn])
