"""The shop: its database, the questions asked of the agent, and who may see which of them.

Every (item, city) pair belongs to exactly one split. Questions of a split are asked about its own
pairs only, so a held-out question can be answered by asking the right tools, never from memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation", "held_out"]
Kind = Literal["stock", "price", "total"]
Pair = tuple[str, str]

KINDS: tuple[Kind, ...] = ("stock", "price", "total")
ITEMS = (
    *("lamp", "chair", "table", "clock", "mug", "sofa", "desk"),
    *("kettle", "vase", "stool", "rug", "mirror", "pillow", "basket"),
)
CITIES = (
    *("Oslo", "Rome", "Lima", "Cairo", "Paris", "Tokyo", "Delhi"),
    *("Quito", "Accra", "Seoul", "Hanoi", "Milan", "Porto", "Dakar"),
)
QUANTITIES = range(2, 10)

PHRASINGS: dict[Kind, tuple[str, str]] = {
    "stock": ("How many {item}s are in {city}?", "Count the {item}s in {city}."),
    "price": ("What does a {item} cost in {city}?", "Name the price of a {item} in {city}."),
    "total": (
        "What do {quantity} {item}s cost in {city}?",
        "Name the price of {quantity} {item}s in {city}.",
    ),
}

# Pair (i, j) lies on diagonal (j - i) mod 14, and a split owns whole diagonals: each of them holds
# every item once and every city once, so all names are equally frequent in all splits.
DIAGONALS: dict[Split, tuple[int, ...]] = {
    "train": (0, 2, 3, 5, 7, 8, 9, 11),
    "validation": (1, 4, 12),
    "held_out": (6, 10, 13),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One question with its only right answer; `task_id` is the same for the same question."""

    kind: Kind
    item: str
    city: str
    quantity: int  # 1 unless `kind` is "total"
    phrasing: int
    split: Split

    @property
    def task_id(self) -> str:
        what = f"{self.quantity}-{self.item}" if self.kind == "total" else self.item
        return f"{self.kind}-{what}-{self.city}-{'ab'[self.phrasing]}".lower()

    @property
    def question(self) -> str:
        return PHRASINGS[self.kind][self.phrasing].format(
            item=self.item, city=self.city, quantity=self.quantity
        )

    @property
    def answer(self) -> str:
        if self.kind == "stock":
            return str(STOCK[self.item, self.city])
        return str(PRICE[self.item, self.city] * self.quantity)

    def reward(self, answer: str | None) -> float:
        """1.0 if the agent's final text is the number asked for, else 0.0."""
        return float(answer is not None and answer.strip() == self.answer)


def pairs(split: Split) -> list[Pair]:
    """The (item, city) pairs that belong to `split`."""
    return [
        (item, city)
        for i, item in enumerate(ITEMS)
        for j, city in enumerate(CITIES)
        if (j - i) % len(CITIES) in DIAGONALS[split]
    ]


def exam(split: Split, count: int = 200) -> list[Task]:
    """`count` distinct tasks of a split, the kinds in equal parts: always the same ones.

    Raises ValueError if the split has too few distinct questions.
    """
    rng = random.Random(f"exam {split}")
    columns = [list(_rounds(kind, split, rng)) for kind in KINDS]
    if count > len(KINDS) * min(len(column) for column in columns):
        raise ValueError(f"count: split {split!r} has too few questions for {count} tasks")
    return [columns[i % len(KINDS)][i // len(KINDS)] for i in range(count)]


def train_tasks(seed: int = 0) -> Iterator[Task]:
    """Training tasks without end, kinds in turn; none repeats before its kind is used up."""
    rng = random.Random(f"train {seed}")
    queues: dict[Kind, list[Task]] = {kind: [] for kind in KINDS}
    while True:
        for kind in KINDS:
            if not queues[kind]:
                queues[kind] = list(_rounds(kind, "train", rng))
            yield queues[kind].pop()


def _rounds(kind: Kind, split: Split, rng: random.Random) -> Iterator[Task]:
    """All pairs of the split in one phrasing each, shuffled; then all in the other phrasing."""
    owned = pairs(split)
    first = [rng.randrange(2) for _ in owned]
    for flip in (0, 1):
        for k in rng.sample(range(len(owned)), len(owned)):
            item, city = owned[k]
            quantity = rng.choice(QUANTITIES) if kind == "total" else 1
            yield Task(kind, item, city, quantity, first[k] ^ flip, split)


def _figures(name: str, other_than: dict[Pair, int] | None = None) -> dict[Pair, int]:
    rng = random.Random(name)
    figures = {}
    for pair in [(item, city) for item in ITEMS for city in CITIES]:
        taken = other_than[pair] if other_than else None
        figures[pair] = rng.choice([value for value in range(11, 100) if value != taken])
    return figures


STOCK = _figures("stock")
FORECAST = _figures("forecast", other_than=STOCK)
PRICE = _figures("price")
LIST_PRICE = _figures("list price", other_than=PRICE)
