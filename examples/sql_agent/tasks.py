"""The questions, the query that answers each, and the careless one. Pairs of item and city belong
to splits as in the shop: a held-out question is about pairs that no training question names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from examples.shop.tasks import PRICE, STOCK, Split, pairs

from .database import Rows

Kind = Literal["units", "worth", "both"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PHRASINGS: dict[Kind, tuple[str, str]] = {
    "units": ("How many {item}s are in {city}?", "Count the {item}s in {city}."),
    "worth": ("What are the {item}s in {city} worth?", "Name the worth of the {item}s in {city}."),
    "both": (
        "How many {item}s are in {city} and {other}?",
        "Count the {item}s in {city} and {other}.",
    ),
}
QUERIES: dict[Kind, str] = {
    "units": "SELECT units FROM stock WHERE item = '{item}' AND city = '{city}'",
    "worth": "SELECT units * price FROM stock JOIN prices USING (item, city)"
    " WHERE item = '{item}' AND city = '{city}'",
    "both": "SELECT SUM(units) FROM stock WHERE item = '{item}'"
    " AND (city = '{city}' OR city = '{other}')",
}
# What is on its way instead of what is there; one price instead of all; two figures, no sum.
CARELESS: dict[Kind, str] = {
    "units": "SELECT units FROM orders WHERE item = '{item}' AND city = '{city}'",
    "worth": "SELECT price FROM prices WHERE item = '{item}' AND city = '{city}'",
    "both": "SELECT units FROM stock WHERE item = '{item}'"
    " AND (city = '{city}' OR city = '{other}')",
}


@dataclass(frozen=True, slots=True)
class Task:
    """One question with its only right answer; `task_id` is the same for the same question."""

    kind: Kind
    item: str
    city: str
    other: str | None  # of `both`: the second city
    phrasing: int
    split: Split

    @property
    def task_id(self) -> str:
        cities = f"{self.city}-{self.other}" if self.other else self.city
        return f"sql-{self.kind}-{self.item}-{cities}-{'ab'[self.phrasing]}".lower()

    @property
    def question(self) -> str:
        return self._filled(PHRASINGS[self.kind][self.phrasing])

    @property
    def query(self) -> str:
        return self._filled(QUERIES[self.kind])

    @property
    def careless_query(self) -> str:
        return self._filled(CARELESS[self.kind])

    @property
    def rows(self) -> Rows:
        """The right answer, by the figures and not by a query."""
        units = STOCK[self.item, self.city]
        if self.kind == "worth":
            units *= PRICE[self.item, self.city]
        if self.other:
            units += STOCK[self.item, self.other]
        return ((units,),)

    def reward(self, rows: Rows | None) -> float:
        """1.0 if the agent came to the right rows, else 0.0; None: it came to none."""
        return float(rows == self.rows)

    def _filled(self, text: str) -> str:
        return text.format(item=self.item, city=self.city, other=self.other)


def exam(split: Split, count: int = 120) -> list[Task]:
    """`count` distinct tasks of a split, the kinds in equal parts: always the same ones.

    Raises ValueError if the split has too few distinct questions.
    """
    rng = random.Random(f"sql exam {split}")
    columns = [list(_rounds(kind, split, rng)) for kind in KINDS]
    if count > len(KINDS) * min(len(column) for column in columns):
        raise ValueError(f"count: split {split!r} has too few questions for {count} tasks")
    return [columns[i % len(KINDS)][i // len(KINDS)] for i in range(count)]


def train_tasks(seed: int = 0) -> Iterator[Task]:
    """Training tasks without end, kinds in turn; none repeats before its kind is used up."""
    rng = random.Random(f"sql train {seed}")
    queues: dict[Kind, list[Task]] = {kind: [] for kind in KINDS}
    while True:
        for kind in KINDS:
            if not queues[kind]:
                queues[kind] = list(_rounds(kind, "train", rng))
            yield queues[kind].pop()


def drawn(rng: random.Random, split: Split) -> Task:
    """A task of the split at random."""
    kind = rng.choice(KINDS)
    item, city = rng.choice(pairs(split))
    return Task(kind, item, city, _other(kind, item, city, split, rng), rng.randrange(2), split)


def _rounds(kind: Kind, split: Split, rng: random.Random) -> Iterator[Task]:
    """All pairs of the split in one phrasing each, shuffled; then all in the other phrasing."""
    owned = pairs(split)
    first = [rng.randrange(2) for _ in owned]
    for flip in (0, 1):
        for k in rng.sample(range(len(owned)), len(owned)):
            item, city = owned[k]
            other = _other(kind, item, city, split, rng)
            yield Task(kind, item, city, other, first[k] ^ flip, split)


def _other(kind: Kind, item: str, city: str, split: Split, rng: random.Random) -> str | None:
    if kind != "both":
        return None
    return rng.choice([c for i, c in pairs(split) if i == item and c != city])
