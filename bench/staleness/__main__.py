"""How old what is trained is, by setting: `python -m bench.staleness`; writes
docs/bench-staleness.md.

The demo's task, from the same warm start, under settings that bound asynchrony. Some drivers ask
the trainer for places (`tracegrad.intake`), others never do.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from bench.pages import ROOT, Say, clock, parser_of, publish
from bench.proxy.machine import description
from bench.tables import markdown, number
from tracegrad_trainer.cli.status import dropped_shares, lag_shares
from tracegrad_trainer.utils.network import find_free_port

# So that all of it takes less than six minutes on two quiet cores.
STEPS, QUICK_STEPS = 10, 3
_LAST_LAG = 5


@dataclass(frozen=True, slots=True)
class Mode:
    """`asks`: its drivers wait for places. Its settings come over the demo's."""

    name: str
    settings: Mapping[str, object]
    asks: bool = True


MODES = (
    Mode("0: data.synchronous", {"data.synchronous": "true", "batches.stale": "drop"}),
    Mode("1, wait", {"batches.max_staleness": 1}),
    Mode("4, wait", {"batches.max_staleness": 4}),
    Mode("1, drop", {"batches.max_staleness": 1, "batches.stale": "drop"}, asks=False),
    Mode("4, drop", {"batches.max_staleness": 4, "batches.stale": "drop"}, asks=False),
)


@dataclass(frozen=True, slots=True)
class Measured:
    mode: Mode
    steps: int
    seconds: float  # of training
    lags: Mapping[str, float]  # share of sampled tokens in batches
    dropped: Mapping[str, float]  # share of turns that were trained or skipped, by reason
    success: float  # of attempts, in the last quarter of the steps' time


_HEAD = """# How old what is trained is

Written by `python -m bench.staleness`; do not edit. The task of `make demo`, its warm start, one
vLLM and two ranks on the same two cores, {steps} steps for each row, one after the other. A token's
lag is the number of policy versions between the one that sampled it and the one that is trained
with it. The rows are `batches.max_staleness` and `batches.stale`: with `wait` the drivers ask the
trainer for places, with `drop` they never do, and go on as fast as they can. "too old": turns that
were dropped for their lag, of all turns that were trained or skipped. The settings are in
[training](training.md#asynchrony).

"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("staleness", __doc__, quick=f"two settings, {QUICK_STEPS} steps each")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    port = find_free_port()
    # Before the shop's agent is imported, which makes its client then.
    os.environ["TRACEGRAD_URL"] = f"http://127.0.0.1:{port}"
    modes, steps = (MODES[:2], QUICK_STEPS) if options.quick else (MODES, STEPS)
    folder = ROOT / ".tracegrad" / "staleness" / time.strftime("%Y-%m-%dT%H-%M-%S")
    say = clock()
    # One loop for all: the agent keeps its client, whose connections belong to the loop.
    with asyncio.Runner() as loop:
        measured = [run(mode, steps, port, folder, say, loop) for mode in modes]
    publish(page(measured, steps), options)
    return 0


def run(
    mode: Mode, steps: int, port: int, folder: Path, say: Say, loop: asyncio.Runner
) -> Measured:
    shop, stages = import_module("examples.shop.run"), import_module("examples.shop.stage")
    state_dir = folder / str(MODES.index(mode))
    plan = shop.Plan(port=port, root=ROOT / ".tracegrad" / "demo", state_dir=state_dir)
    model = shop.warm_up(plan, import_module("examples.shop.screen").Screen())
    settings = {**shop.SERVE, **mode.settings}
    with stages.served(port, model, state_dir, settings, lambda _: None) as stage:
        say(f"{mode.name}: everything is up")
        measured = loop.run(_train(mode, steps, shop, stage))
    say(f"{mode.name}: {measured.steps} steps in {measured.seconds:.0f} s")
    return measured


async def _train(mode: Mode, steps: int, shop: Any, stage: Any) -> Measured:
    drive, tasks = import_module("examples.shop.drive"), import_module("examples.shop.tasks")
    tracegrad = import_module("tracegrad")
    samples = shop.SAMPLES

    def is_over() -> bool:
        stage.check()
        return bool(stage.last_step >= steps)

    def until_over() -> Iterator[Any]:
        return takewhile(lambda _: not is_over(), tasks.train_tasks(0))

    async def permit() -> None:
        while mode.asks and not is_over():
            with suppress(TimeoutError):
                await tracegrad.intake(samples, timeout_s=1.0)
                return

    began = time.monotonic()
    ended: list[tuple[float, float]] = []  # when a group was done, its success
    async for group in drive.train(until_over(), samples=samples, permit=permit):
        ended.append((time.monotonic(), statistics.fmean(group.successes)))
    seconds = time.monotonic() - began
    await shop.settle(stage)
    made = stage.steps()
    late = [success for at, success in ended if at - began > 0.75 * seconds]
    return Measured(
        mode=mode,
        steps=len(made),
        seconds=seconds,
        lags=lag_shares([step.metrics for step in made]),
        dropped=dropped_shares(stage.turn_counts()),
        success=statistics.fmean(late),
    )


def page(measured: Sequence[Measured], steps: int) -> str:
    lags = [f"lag {lag}" for lag in range(_LAST_LAG)]
    header = ["", *lags, f"{_LAST_LAG} and more", "too old", "s a step", "success, last"]
    return "\n".join(
        [
            _HEAD.format(steps=steps)
            + "\n".join(f"- {line}" for line in description(["vllm", "torch"])),
            f"- {time.strftime('%Y-%m-%d', time.gmtime())}",
            "",
            markdown(header, [_row(one) for one in measured]),
            "Lag columns: of the tokens that batches sampled, trained or not. `success, last`: of"
            " attempts in the last quarter of the time.\n",
        ]
    )


def _row(one: Measured) -> list[str]:
    by_lag = [one.lags.get(str(lag), 0.0) for lag in range(_LAST_LAG)]
    older = max(0.0, 1.0 - sum(by_lag))
    stale = one.dropped.get("stale", 0.0)
    shares = [f"{100 * share:.1f} %" for share in (*by_lag, older, stale)]
    return [one.mode.name, *shares, number(one.seconds / one.steps), f"{one.success:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
