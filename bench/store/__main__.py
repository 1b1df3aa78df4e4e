"""`python -m bench.store`: turns in and out, bytes, a training batch, and what growth costs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.pages import clock, parser_of, publish
from bench.proxy import machine
from bench.store import report
from bench.store.batch import GROUP, batch
from bench.store.goals import BATCH_ROLLOUTS
from bench.store.growth import growth
from bench.store.places import flush_ms, places, postgresql_version
from bench.store.rollouts import LONG, SHORT
from bench.store.sizes import common, size
from bench.store.traffic import Cell, traffic

_PACKAGES = ("sqlalchemy", "psycopg", "zstandard", "orjson")


@dataclass(frozen=True, slots=True)
class Plan:
    cells: Sequence[Cell]
    size_rollouts: int
    groups: int
    times: int
    sizes: Sequence[int]

    @classmethod
    def of(cls, *, quick: bool) -> Plan:
        if quick:
            cells = [Cell(SHORT, 8, 2, 1), Cell(SHORT, 64, 2, 1), Cell(LONG, 8, 1, 1)]
            return cls(cells, 8, 2, 1, (1_000, 10_000))
        cells = [
            Cell(SHORT, 1, 64, 3),
            Cell(SHORT, 8, 24, 3),
            Cell(SHORT, 64, 12, 3),
            Cell(LONG, 1, 8, 3),
            Cell(LONG, 8, 2, 3),
            Cell(LONG, 64, 1, 3),
        ]
        sizes = (1_000, 10_000, 100_000, 500_000)
        return cls(cells, 48, BATCH_ROLLOUTS // GROUP, 5, sizes)


def main() -> None:
    options = parser_of("store", __doc__, quick="a smoke").parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-store-"))
    try:
        text = _measure(Plan.of(quick=options.quick), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(text, options)


def _measure(plan: Plan, folder: Path) -> str:
    start, busy, say = time.monotonic(), machine.busy_s(), clock()
    written, sizes, shared, batches, growths = [], [], [], [], []
    flush = flush_ms(folder)
    with places(folder) as found:
        for cell in plan.cells:
            say(f"{cell.shape.name} turns, {cell.threads} writers")
            written += [traffic(place, cell) for place in found]
        for place in found:
            say(f"{place.name}: bytes")
            sizes += [size(place, shape, plan.size_rollouts) for shape in (SHORT, LONG)]
            shared.append(common(place, plan.size_rollouts))
            say(f"{place.name}: a training batch")
            batches.append(batch(place, plan.groups, plan.times))
        for place in found:
            growths.append(growth(place, plan.sizes, say))
    say("done")
    return report.page(
        made=[
            *machine.ran(start, busy),  # the server has ended
            f"the disk keeps 4 KiB for good in {flush:.2f} ms",
        ],
        machine=[*machine.description(_PACKAGES), f"PostgreSQL {postgresql_version()}"],
        traffic=written,
        sizes=sizes,
        shared=shared,
        batches=batches,
        growths=growths,
    )


if __name__ == "__main__":
    main()
