"""`python -m bench.trainer`: steps beside other loops, building batches, the head's memory."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.pages import clock, parser_of, publish
from bench.proxy import machine
from bench.trainer import report
from bench.trainer.building import building
from bench.trainer.head import head_memory
from bench.trainer.model import SIZE, TINY, Size, write_model
from bench.trainer.rollouts import LONG, MIXED, Shape, tasks
from bench.trainer.rounds import measure
from bench.trainer.work import Work

_PACKAGES = ("torch", "transformers", "trl")
_GROUP = 4
# Tokens of one forward of ours, rows of one of TRL's: about as many.
_BUDGET, _ROWS = 4_096, 4
# So many logits are 3 GB while a softmax is taken of them.
_PLAIN_LOGITS = 1 << 28


@dataclass(frozen=True, slots=True)
class Plan:
    size: Size
    groups: dict[str, int]  # of a shape's step
    rounds: int
    built: int  # groups
    times: int
    heads: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, *, quick: bool) -> Plan:
        if quick:
            few = {LONG.name: 1, MIXED.name: 2}
            return cls(TINY, few, 1, 4, 2, ((1_024, 65_536), (2_048, 65_536)))
        sizes = ((2_048, 32_768), (4_096, 65_536), (8_192, 131_072))
        return cls(SIZE, {LONG.name: 2, MIXED.name: 8}, 3, 32, 5, sizes)


def main() -> None:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="bench-trainer-"))
    try:
        text = _measure(Plan.of(quick=options.quick), options.threads, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(text, options)


def _options() -> argparse.Namespace:
    parser = parser_of("trainer", __doc__, quick="a smoke")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each peer"
    )
    return parser.parse_args()


def _measure(plan: Plan, threads: int, folder: Path) -> str:
    start, busy, say = time.monotonic(), machine.busy_s(), clock()
    model = write_model(plan.size, folder / "model")

    def work(shape: Shape, groups: int) -> Work:
        return Work(tasks(shape, groups, _GROUP, plan.size.vocabulary), model, _BUDGET, _ROWS)

    shapes = (LONG, MIXED)
    steps = []
    for shape in shapes:
        of_step = work(shape, plan.groups[shape.name])
        steps.append(measure(shape, of_step, rounds=plan.rounds, threads=threads, say=say))
    say("building batches")
    buildings = [building(shape, work(shape, plan.built), plan.times) for shape in shapes]
    say("the head's memory")
    heads = head_memory(plan.heads, plain_logits=_PLAIN_LOGITS)
    say("done")
    return report.page(
        made=[
            *machine.ran(start, busy),
            f"{plan.size.words}; {threads} thread{'s' if threads > 1 else ''} each",
        ],
        machine=machine.description(_PACKAGES),
        steps=steps,
        buildings=buildings,
        heads=heads,
    )


if __name__ == "__main__":
    main()
