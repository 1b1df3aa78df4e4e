"""`python -m bench.ui`: how long the server takes for each page where there are a million rollouts
and ten thousand steps, and for one rollout of thousands of turns; writes docs/bench-ui.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.pages import ROOT, clock, parser_of, publish
from bench.ui.big_store import StoreSize, make_store
from bench.ui.long_rollout import add_long_rollout
from bench.ui.pages import pages_of, pages_of_long_rollout
from bench.ui.report import page
from bench.ui.timing import timed
from tracegrad.host_memory import tune_gc
from tracegrad.store import Store

WHOLE, QUICK = StoreSize(1_000_000, 10_000), StoreSize(20_000, 200)
TURNS, QUICK_TURNS = 5_000, 200
ROUNDS, QUICK_ROUNDS = 20, 2


def main(arguments: Sequence[str] | None = None) -> int:
    quick = f"{QUICK.rollouts:,} rollouts, {QUICK.steps} steps"
    parser = parser_of("ui", __doc__, quick=quick)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / ".cache" / "bench-ui",
        help="of stores, kept for next time",
    )
    options = parser.parse_args(arguments)
    size, turns, rounds = WHOLE, TURNS, ROUNDS
    if options.quick:
        size, turns, rounds = QUICK, QUICK_TURNS, QUICK_ROUNDS
    options.folder.mkdir(parents=True, exist_ok=True)
    tune_gc()  # as the proxy does, which serves these pages
    say = clock()
    with make_store(options.folder / f"{size.rollouts}-{size.steps}.db", size) as store:
        say("the large store is there")
        timings = timed(store, pages_of(size), rounds)
    with Store.open(f"sqlite:///{options.folder}/long-{turns}.db") as store:
        add_long_rollout(store, turns)
        say("the long rollout is there")
        timings += timed(store, pages_of_long_rollout(turns), rounds)
    publish(page(timings, size, turns=turns, rounds=rounds), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
