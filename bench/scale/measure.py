"""A day on each database, and shorter ones with single assumptions changed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.store import postgres_server as postgres
from tokenizers import Tokenizer

from bench.pages import Say
from bench.scale.day import EPOCH, Outcome, Plan, simulate
from bench.scale.demands import Demands
from bench.scale.needs import LONGER_OUTPUTS, LONGER_REPLIES, changed
from bench.scale.rig import Database, Rig, postgresql_server, rig, sqlite_file
from bench.scale.session import Texts
from bench.scale.tokenizer import save_tokenizer
from bench.scale.workload import DAY_S, SMALL_MODEL, EngineRates, Workload
from tracegrad.store import Store
from tracegrad.store.maintenance.drop_text import TextRemovalRule, preview_drop_text
from tracegrad.store.maintenance.selection import RolloutSelection

# Calls before anything is measured: modules load, the tokenizer is proven.
_WARM_UP_CALLS = 60
# A guess at the calls a second of one caller, for how many agents the first days have.
_CALLS_S = 60


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of real time, about: of a day with all that is due sent at once, and of one that
    sends one call after another."""

    day_s: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """`alone`: a day of fewer agents whose calls come one after another. `text_share`: of the
    store's bytes, those of requests and responses."""

    database: str
    day: Outcome
    alone: Outcome
    text_share: float

    @property
    def at_peak(self) -> Demands:
        return Demands.of(self.day.peak, self.day.whole)

    @property
    def one_by_one(self) -> Demands:
        return Demands.of(self.alone.whole, self.alone.whole)


@dataclass(frozen=True, slots=True)
class Found:
    """`variants`: demands one by one, by the assumption that was changed and its factor."""

    workload: Workload
    engine: EngineRates
    databases: tuple[Measured, Measured]  # SQLite, PostgreSQL
    variants: Mapping[tuple[str, float], Demands]


def measure(workload: Workload, budget: Budget, folder: Path, say: Say) -> Found:
    tokenizer = save_tokenizer(folder / "tokenizer")
    texts = Texts(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
    found: list[Measured] = []
    variants: dict[tuple[str, float], Demands] = {}
    with databases(folder) as places:
        for place in places:
            with rig(folder, place, tokenizer, now=EPOCH) as processes:
                runs = _Runs(processes, texts, say)
                found.append(runs.day(workload, budget))
                if place.name == "SQLite":
                    variants = runs.variants(workload, budget)
    return Found(workload, SMALL_MODEL, (found[0], found[1]), variants)


@contextmanager
def databases(folder: Path) -> Iterator[tuple[Database, Database]]:
    """A file, and a server of the benchmark's own; both flush every commit to the disk."""
    with postgres.running(durable=True) as server:
        yield (
            sqlite_file(folder / "store.db"),
            postgresql_server(server.new_database(), server.process.pid),
        )


def sample(workload: Workload, calls: float) -> int:
    """One agent in how many makes about so many calls a day."""
    return max(1, math.ceil(workload.expected_calls / calls))


class _Runs:
    """The days of one proxy: each begins where the one before ended."""

    def __init__(self, processes: Rig, texts: Texts, say: Say) -> None:
        self._rig, self._texts, self._say = processes, texts, say
        self._days = 0

    def day(self, workload: Workload, budget: Budget) -> Measured:
        name = self._rig.database.name
        self._run("warm-up", workload, sample(workload, _WARM_UP_CALLS))
        alone = self._alone(workload, budget)
        done = alone.whole.done
        # Together they are faster than one by one: the day takes somewhat less than it may.
        every = sample(workload, done.calls / done.wall_s * budget.day_s)
        day = self._run("day", workload, every)
        return Measured(name, day, alone, self._text_bytes() / self._rig.used().store_bytes)

    def variants(self, workload: Workload, budget: Budget) -> dict[tuple[str, float], Demands]:
        """How long a tool takes changes nothing of a call."""
        found: dict[tuple[str, float], Demands] = {}
        for (assumption, factor), other in changed(workload).items():
            if assumption in (LONGER_REPLIES, LONGER_OUTPUTS):
                outcome = self._alone(other, budget, f"{factor:g} times the {assumption}")
                found[assumption, factor] = Demands.of(outcome.whole, outcome.whole)
        return found

    def _alone(self, workload: Workload, budget: Budget, what: str = "one by one") -> Outcome:
        calls = _CALLS_S * budget.alone_s
        return self._run(what, workload, sample(workload, calls), together=False)

    def _run(self, what: str, workload: Workload, every: int, *, together: bool = True) -> Outcome:
        plan = Plan(
            workload,
            SMALL_MODEL,
            label=f"d{self._days}",
            every=every,
            together=together,
            epoch=EPOCH + self._days * DAY_S,
        )
        self._days += 1
        outcome = asyncio.run(simulate(plan, self._rig, self._texts))
        done = outcome.whole.done
        self._say(
            f"{self._rig.database.name}, {what}: {done.calls:,.0f} calls in {done.wall_s:.0f} s,"
            f" one agent in {every}, {outcome.failed.total()} failed"
        )
        return outcome

    def _text_bytes(self) -> int:
        with Store.attach(self._rig.database.url) as store:
            counts = preview_drop_text(store, TextRemovalRule(selection=RolloutSelection()))
        return int(counts["bytes"])
