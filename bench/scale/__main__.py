"""`python -m bench.scale`: a simulated day of 10,000 agents, its first bottleneck, and what 10,
1,000 and 100,000 concurrent rollouts need. Writes docs/bench-scale.md."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.pages import clock, parser_of, publish
from bench.proxy import machine
from bench.scale.measure import Budget, measure
from bench.scale.report import page
from bench.scale.workload import Workload
from bench.store.places import flush_ms, postgresql_version

_PACKAGES = ("uvicorn", "aiohttp", "orjson", "tokenizers", "sqlalchemy", "psycopg")
MINUTES, QUICK_MINUTES = 10.0, 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where calls failed."""
    parser = parser_of("scale", __doc__, quick="a day of few agents, in a minute")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of a day on one database, at most; decides how many of the agents are simulated."
        f" Default: {MINUTES:g}",
    )
    options = parser.parse_args(arguments)
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    budget = Budget(day_s=60 * minutes, alone_s=60 * minutes / 10)
    start, busy = time.monotonic(), machine.busy_s()
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        flush = flush_ms(Path(folder))
        found = measure(Workload(), budget, Path(folder), clock())
    text = page(
        found,
        made=[
            *machine.ran(start, busy),
            f"the disk keeps 4 KiB for good in {flush:.2f} ms",
        ],
        machine=[*machine.description(_PACKAGES), f"PostgreSQL {postgresql_version()}"],
    )
    publish(text, options)
    return 1 if any(each.day.failed or each.alone.failed for each in found.databases) else 0


if __name__ == "__main__":
    sys.exit(main())
