"""What the store is meant to reach, and whether this run did."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.store.batch import Batch
from bench.store.growth import Growth, Operation
from bench.store.rollouts import SHORT
from bench.store.sizes import Size
from bench.store.traffic import Traffic
from bench.tables import Goal

TURNS_PER_S = 2_000
WRITERS = 64
BYTES_PER_TOKEN = 10.0
BATCH_S = 2.0
BATCH_ROLLOUTS = 256
# A database's trees have one level more for some hundred times as many rows.
FLAT = 1.5
FAR = 10_000_000
_MADE = 500_000


def goals(
    traffic: Sequence[Traffic],
    sizes: Sequence[Size],
    batches: Sequence[Batch],
    growths: Sequence[Growth],
) -> list[Goal]:
    return [
        *_durable(traffic),
        *_size(sizes),
        *_batch(batches),
        *(goal for growth in growths for goal in _flat(growth)),
    ]


def at_ten_million(growth: Growth, operation: Operation) -> float:
    """Milliseconds. What grows does so on a straight line through the base and the largest size;
    what is flat, as trees do, with the logarithm of the number of turns."""
    times, last = growth.times(operation), growth.medians(operation)[-1]
    sizes = (growth.base, growth.sizes[-1], FAR)
    low, high, far = sizes if times > FLAT else map(math.log, sizes)
    slope = (last - last / times) / (high - low)
    return last + max(slope, 0.0) * (far - high)


def _durable(traffic: Sequence[Traffic]) -> list[Goal]:
    return [
        Goal(
            f"durable turns/s, {one.place}, {one.cell.threads} writers in one process,"
            f" {one.cell.shape.name} turns",
            f"at least {TURNS_PER_S:,}",
            f"{one.written.turns_per_s:,.0f}",
            one.written.turns_per_s >= TURNS_PER_S,
        )
        for one in traffic
        if one.cell.threads == WRITERS and one.place == "SQLite" and one.cell.shape is SHORT
    ]


def _size(sizes: Sequence[Size]) -> list[Goal]:
    return [
        Goal(
            f"bytes a unique token without text, {one.place}, {one.shape.name} turns",
            f"at most {BYTES_PER_TOKEN:g}",
            f"{one.per_token:.2f}",
            one.per_token <= BYTES_PER_TOKEN,
        )
        for one in sizes
    ]


def _batch(batches: Sequence[Batch]) -> list[Goal]:
    return [
        Goal(
            f"lease and load {one.rollouts} rollouts of {one.turns // one.rollouts} turns,"
            f" {one.last_context:,} tokens each, {one.place}",
            f"below {BATCH_S:g} s",
            f"{one.seconds:.2f} s",
            one.seconds < BATCH_S,
        )
        for one in batches
        if one.rollouts == BATCH_ROLLOUTS
    ]


def _flat(growth: Growth) -> list[Goal]:
    if growth.sizes[-1] < _MADE:
        return []
    return [
        Goal(
            f"{operation.name}, {growth.place}: {growth.sizes[-1]:,} turns to {growth.base:,}",
            f"at most {FLAT:g} times as long",
            f"{growth.times(operation):.2f} times",
            growth.times(operation) <= FLAT,
        )
        for operation in growth.rounds
        if operation.flat
    ]
