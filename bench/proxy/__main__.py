"""`python -m bench.proxy`: direct, a plain pass-through, tracegrad and LiteLLM side by side."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from bench.pages import clock, parser_of, publish
from bench.proxy import cells, machine, peers, report
from bench.proxy.cells import Cell
from bench.proxy.endurance import Memory, Stored, memory, stored
from bench.proxy.goals import goals
from bench.proxy.peers import LITELLM_TWO, OURS_TWO
from bench.proxy.rounds import Result, run
from bench.proxy.servers import HOST, DidNotStart, Server

_PACKAGES = ("uvicorn", "uvloop", "httptools", "aiohttp", "starlette", "orjson", "sqlalchemy")


@dataclass(frozen=True, slots=True)
class Plan:
    at_once: Sequence[Cell]
    at_a_rate: Sequence[Cell]
    with_tokens: Sequence[Cell]
    soak_calls: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        every = [*cells.at_once(), *cells.at_a_rate(), *cells.with_tokens()]
        whole = cells.quick() if options.quick else every
        chunked = [
            replace(cell, chunk_tokens=options.chunk_tokens) if cell.stream else cell
            for cell in whole
        ]
        return cls(
            [cell for cell in chunked if cell.rate is None and not cell.tokens],
            [cell for cell in chunked if cell.rate is not None and not cell.tokens],
            [cell for cell in chunked if cell.tokens],
            2_000 if options.quick else 20_000,
        )

    def wants(self, server: str) -> bool:
        return any(server in cell.servers for cell in self.at_once)


def main() -> None:
    options = _options()
    plan = Plan.of(options)
    peers.CACHE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=peers.CACHE))
    try:
        with ExitStack() as stack:
            servers = _start(stack, folder, plan, options)
            text = uvloop.run(_measure(plan, servers, folder))
    except DidNotStart as error:
        print(f"bench: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(text, options)


def _options() -> argparse.Namespace:
    parser = parser_of("proxy", __doc__, quick="two minutes")
    parser.add_argument("--without-litellm", action="store_true", help="where it cannot be had")
    parser.add_argument("--chunk-tokens", type=int, default=1, help="tokens a chunk of a stream")
    return parser.parse_args()


def _start(
    stack: ExitStack, folder: Path, plan: Plan, options: argparse.Namespace
) -> dict[str, Server]:
    """Raises DidNotStart."""
    engine = stack.enter_context(peers.engine(folder))
    url = f"http://{HOST}:{engine.port}"
    others = [peers.pass_through(folder, url), peers.tracegrad(folder, url)]
    if plan.wants(OURS_TWO):
        others.append(peers.tracegrad(folder, url, workers=2))
    if not options.without_litellm:
        try:
            others.append(peers.litellm(folder, url))
        except subprocess.CalledProcessError:
            raise DidNotStart(
                "LiteLLM's packages cannot be installed; --without-litellm leaves it out"
            ) from None
        if plan.wants(LITELLM_TWO):
            others.append(peers.litellm(folder, url, workers=2))
    servers = [engine, *(stack.enter_context(server) for server in others)]
    for server in servers:
        server.wait()
    return {server.name: server for server in servers}


async def _measure(plan: Plan, servers: dict[str, Server], folder: Path) -> str:
    start, busy, own, say = time.monotonic(), machine.busy_s(), _own_cpu_s(servers), clock()
    say("bytes stored")
    sizes: Stored = await stored(servers[peers.OURS], peers.store_path(folder))
    say(f"memory over {plan.soak_calls:,} calls")
    flat: Memory = await memory(servers[peers.OURS], plan.soak_calls)
    results: dict[str, list[Result]] = {}
    chosen_cells = {
        "rate": plan.at_a_rate,
        "once": plan.at_once,
        "tokens": plan.with_tokens,
    }
    for kind, chosen in chosen_cells.items():
        results[kind] = []
        for cell in chosen:
            say(cell.name)
            results[kind].append(await run(cell, servers))
    say("done")
    wall_s = time.monotonic() - start
    busy, own = machine.busy_s() - busy, _own_cpu_s(servers) - own
    every = [result for kind in results.values() for result in kind]
    return report.page(
        made=[
            f"{datetime.now(UTC):%Y-%m-%d}, in {wall_s / 60:.0f} minutes",
            machine.others(busy, own, wall_s),
        ],
        machine=[*machine.description(_PACKAGES), f"LiteLLM {peers.litellm_version()}"],
        goals=goals(every, flat, sizes),
        at_once=results["once"],
        at_a_rate=results["rate"],
        with_tokens=results["tokens"],
        memory=flat,
        stored=sizes,
    )


def _own_cpu_s(servers: dict[str, Server]) -> float:
    return time.process_time() + sum(server.usage().cpu_s for server in servers.values())


if __name__ == "__main__":
    main()
