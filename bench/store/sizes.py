"""Bytes on the disk for a token that no earlier turn has; ids and log-probabilities both count."""

from __future__ import annotations

from dataclasses import dataclass

from bench.store.places import Place
from bench.store.rollouts import Shape, rollout
from tracegrad.store import Store

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


def _growth(place: Place, shape: Shape, rollouts: int, *, texts: bool) -> int:
    url = place.new_url()
    try:
        with Store.open(url) as store:
            for number in range(_FIRST):
                _write(store, shape, number, texts=texts)
            before = place.size(url)
            for number in range(rollouts):
                _write(store, shape, _FIRST + number, texts=texts)
            return place.size(url) - before
    finally:
        place.drop(url)


def _write(store: Store, shape: Shape, number: int, *, texts: bool) -> None:
    """A turn a transaction: what is kept of earlier ones is then what it is in use."""
    made = rollout(shape, number, texts=texts)
    store.append([made.opened])
    for turn in made.turns:
        store.append([turn])
