"""`python -m bench.soak`: the demo's task trained without end, with background chat traffic in all
dialects: memory flat, no drift in latency, reward holds, nothing fails. Writes docs/bench-soak.md
and its picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from bench.pages import ROOT, clock, parser_of, publish
from bench.soak.report import draw, page
from bench.soak.run import run
from bench.soak.verdicts import verdicts

MINUTES, QUICK = 30.0, 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """1: a verdict failed."""
    parser = parser_of("soak", __doc__, quick=f"{QUICK:.0f} minutes")
    parser.add_argument("--minutes", type=float, default=None, help=f"default: {MINUTES:.0f}")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="conversations of the background, a second"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    minutes = options.minutes or (QUICK if options.quick else MINUTES)
    folder = ROOT / ".tracegrad" / "soak" / time.strftime("%Y-%m-%dT%H-%M-%S")
    folder.mkdir(parents=True)
    found = run(folder, minutes, options.rate, options.seed, clock())
    judged = verdicts(found)
    out = options.out or (folder / "page.md" if options.quick else options.page)
    picture = out.with_suffix(".svg")
    draw(found, picture)
    options.out = out
    publish(page(found, judged, picture.name), options)
    failed = [verdict for verdict in judged if verdict.met is False]
    for verdict in failed:
        print(f"soak: {verdict.what}: {verdict.measured}; {verdict.wanted}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
