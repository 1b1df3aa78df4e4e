"""How long streams have no token while weights change: `python -m bench.push`; writes
docs/bench-push.md.

A real vLLM on this machine's CPU serves a model made from nothing; eight streams sample from it
while its weights are pushed again and again. Both kinds of `push.kv_cache` take turns, so that
drift of the machine hits both alike. The gap of a push is the longest that any of the streams had
between two chunks while it lasted; the streams' usual pause is beside it.
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import httpx
import torch

from bench.pages import Say, clock, parser_of, publish
from bench.tables import Goal, goal_table, markdown, number
from tracegrad.urls import http_base
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_push import PushReport, WeightPusher

STREAMS = 8
VOCABULARY = 420
CONTEXT = 160  # tokens of a stream's prompt
GOAL_S = 0.15
# Hidden units and layers; the parameters are counted.
SIZES = {"1M": (128, 4), "25M": (512, 8)}
KINDS = ("recompute", "keep")


@dataclass(frozen=True, slots=True)
class PushGap:
    kind: str
    report: PushReport
    gap_s: float  # the longest of any stream


@dataclass(slots=True)
class Streams:
    """Eight at a time, each begun again when it ends; when each chunk came."""

    client: httpx.AsyncClient
    version: int = 0
    arrivals: dict[int, list[float]] = field(default_factory=dict)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number_ in range(STREAMS):
                group.create_task(self._endless(number_))

    async def _endless(self, stream: int) -> None:
        turn = 0
        while True:
            turn += 1
            request = {
                "model": "policy",
                "prompt": [3 + (stream * 7 + turn * 13 + i) % 200 for i in range(CONTEXT)],
                "max_tokens": 300,
                "ignore_eos": True,
                "stream": True,
                "cache_salt": str(self.version),
            }
            async with self.client.stream("POST", "/v1/completions", json=request) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line:
                        self.arrivals.setdefault(stream, []).append(time.monotonic())

    def longest_gap(self, begin: float, end: float) -> float:
        """Of any stream, between chunks around [begin, end]."""
        return max(max(_gaps(times, begin, end), default=0.0) for times in self.arrivals.values())

    def usual_gap(self) -> float:
        every = [
            later - earlier
            for times in self.arrivals.values()
            for earlier, later in pairwise(times)
        ]
        return statistics.median(every)


def _gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    pairs = pairwise(times)
    return [later - earlier for earlier, later in pairs if later >= begin and earlier <= end]


def main() -> int:
    options = parser_of("push", __doc__, quick="the small model and four pushes").parse_args()
    say, found = clock(), {}
    sizes = dict(list(SIZES.items())[:1]) if options.quick else SIZES
    for name, (hidden, layers) in sizes.items():
        found[name] = measure(hidden, layers, pushes=2 if options.quick else 10, say=say)
    publish(page(found), options)
    return 0


@dataclass(frozen=True, slots=True)
class Measured:
    parameters: int
    usual_s: float
    pushes: list[PushGap]

    def gaps(self, kind: str) -> list[float]:
        return [one.gap_s for one in self.pushes if one.kind == kind]

    def paused(self, kind: str) -> list[float]:
        return [one.report.paused_s or 0.0 for one in self.pushes if one.kind == kind]


def measure(hidden: int, layers: int, *, pushes: int, say: Say) -> Measured:
    """`pushes` of each kind."""
    torch.manual_seed(0)
    shop_model = import_module("examples.shop.model")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tokenizer = shop_model.train_tokenizer(["where is order 42?"] * 50, VOCABULARY)
        model = shop_model.new_model(tokenizer, hidden=hidden, layers=layers)
        count = sum(parameter.numel() for parameter in model.parameters())
        shop_model.save(model, tokenizer, place / "model")
        settings = VllmSettings(
            model=str(place / "model"),
            socket=place / "vllm.sock",
            max_model_len=512,
            kv_cache_memory_bytes=512 << 20,
            log=place / "vllm.log",
        )
        say(f"{count / 1e6:.1f}M parameters: vLLM starts")
        process = VllmProcess(settings)
        process.start()
        try:
            process.wait_healthy(timeout=600)
            return asyncio.run(_measure(process.url, place, model, count, pushes, say))
        finally:
            process.stop()


async def _measure(
    url: str, place: Path, model: torch.nn.Module, count: int, pushes: int, say: Say
) -> Measured:
    transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix://"))
    found: list[PushGap] = []
    async with httpx.AsyncClient(
        transport=transport, base_url=http_base(url), timeout=600
    ) as client:
        streams = Streams(client)
        sampling = asyncio.create_task(streams.run())
        await asyncio.sleep(5)
        with ExitStack() as stack:
            pushers = [
                stack.enter_context(
                    WeightPusher(url, checkpoint=place / "model", keep_cache=kind == "keep")
                )
                for kind in KINDS
            ]
            for version in range(1, 2 * pushes + 3):
                turn = version % 2
                pusher, kind = pushers[turn], KINDS[turn]
                new = await asyncio.to_thread(pusher.write, version, model.state_dict().items())
                await asyncio.sleep(1)
                begin = time.monotonic()
                streams.version = version
                report = await asyncio.to_thread(pusher.serve, new)
                end = time.monotonic()
                await asyncio.sleep(2)
                if version <= 2:  # a pusher's first push keeps nothing
                    continue
                found.append(PushGap(kind, report, streams.longest_gap(begin, end)))
                say(f"{kind}: {found[-1].gap_s:.3f} s without a token")
        usual = streams.usual_gap()
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    return Measured(count, usual, found)


def page(found: dict[str, Measured]) -> str:
    goals = []
    rows = []
    for name, measured in found.items():
        for kind in KINDS:
            gaps, paused = measured.gaps(kind), measured.paused(kind)
            median = statistics.median(gaps)
            goals.append(
                Goal(
                    f"{name}, {kind}: longest pause of a stream, median of {len(gaps)} pushes",
                    f"below {GOAL_S} s",
                    f"{median:.3f} s",
                    median < GOAL_S,
                )
            )
            rows.append(
                [
                    f"{measured.parameters / 1e6:.1f}M",
                    kind,
                    str(len(gaps)),
                    number(statistics.median(paused)),
                    number(median),
                    number(max(gaps)),
                    f"{measured.usual_s:.3f}",
                ]
            )
    header = [
        *("parameters", "push.kv_cache", "pushes", "engine paused, s"),
        *("longest pause of a stream, s", "worst", "usual pause, s"),
    ]
    return PAGE.format(
        goals=goal_table(goals),
        table=markdown(header, rows),
        streams=STREAMS,
        context=CONTEXT,
        machine=f"{platform.machine()}, {torch.get_num_threads()} threads, {time.strftime('%F')}",
    )


PAGE = """\
# Streams while weights are pushed

Written by `python -m bench.push`; do not edit. A real vLLM on a CPU serves float32 weights to
{streams} streams (prompts of {context} tokens, 300 sampled) while they are replaced. Both kinds of
`push.kv_cache` take turns. {machine}.

{goals}
{table}
`recompute`: what running requests had computed with the old weights is computed again, before their
next token: its time grows with context and model. `keep`: they go on with it.
"""


if __name__ == "__main__":
    sys.exit(main())
