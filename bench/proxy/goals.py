"""What the proxy is meant to reach, and whether this run did."""

from __future__ import annotations

from collections.abc import Sequence

from bench.proxy.cells import FEW
from bench.proxy.endurance import Memory, Stored
from bench.proxy.peers import LITELLM, OURS, OURS_TWO, PLAIN
from bench.proxy.rounds import Result
from bench.tables import Goal

ADDED_MS = 2.0
OF_PLAIN = 0.7
# Where all ask for tokens, of the pass-through: its calls a second, and its CPU for a stream.
OF_PLAIN_FEW = 0.8
STREAM_CPU = 1.5
OF_LITELLM = 10.0
OF_ONE_WORKER = 1.6
FIRST_TURN_BYTES = 45_000
GROWTH = 0.05
LATER = 1.2
# Before so many calls the cache of recent turns has not filled.
LONG = 20_000


def goals(results: Sequence[Result], memory: Memory, stored: Stored) -> list[Goal]:
    found = [
        *_latency(results),
        *_beside_plain(results),
        *_throughput(results),
        *_workers(results),
        *_streams(results),
    ]
    if memory.samples[-1][0] >= LONG:
        found.append(_memory(memory))
    return [*found, *_size(stored)]


def _memory(memory: Memory) -> Goal:
    return Goal(
        f"memory over {memory.samples[-1][0]:,} calls, the second half of them",
        f"at most {GROWTH:+.0%}, no error",
        f"{memory.grown:+.1%}, {len(memory.errors)} errors",
        memory.grown <= GROWTH and not memory.errors,
    )


def _size(stored: Stored) -> list[Goal]:
    later = stored.later[-1] / stored.later[0]
    return [
        Goal(
            "stored for a first turn (8k prompt, 512 output)",
            f"at most {FIRST_TURN_BYTES / 1e3:g} kB",
            f"{stored.first / 1e3:.1f} kB",
            stored.first <= FIRST_TURN_BYTES,
        ),
        Goal(
            "stored for later turns: only what is new",
            f"the last at most {LATER:g} times the second",
            f"{stored.later[0] / 1e3:.1f} kB, then {stored.later[-1] / 1e3:.1f} kB",
            later <= LATER,
        ),
    ]


def _latency(results: Sequence[Result]) -> list[Goal]:
    found = []
    for result in results:
        cell = result.cell
        if cell.prompt_tokens != 8192 or not (cell.concurrency == 1 or cell.rate == 100):
            continue
        if cell.concurrency == FEW:
            continue  # `_beside_plain`
        if cell.tokens and cell.stream:
            continue  # its words come in the same piece as its prompt's ids
        what = "first_p50" if cell.stream else "p50"
        added = result.added(OURS, what)
        if added is not None:
            name = "time to first words" if cell.stream else "p50"
            found.append(
                Goal(
                    f"added {name}, {cell.name}",
                    f"at most {ADDED_MS:g} ms",
                    f"{added:.2f} ms",
                    added <= ADDED_MS,
                )
            )
    return found


def _beside_plain(results: Sequence[Result]) -> list[Goal]:
    """Few callers that ask for tokens: what tracegrad costs more than the pass-through."""
    found = []
    for result in results:
        cell = result.cell
        if cell.concurrency != FEW or not cell.tokens or PLAIN not in result.rounds:
            continue
        for server in (OURS, OURS_TWO):
            if server in result.rounds:
                found.append(_beside_plain_of(result, server))
    return found


def _beside_plain_of(result: Result, server: str) -> Goal:
    cell = result.cell
    if cell.rate == 100:
        more = (result.added(server, "p50") or 0.0) - (result.added(PLAIN, "p50") or 0.0)
        wanted, measured = f"at most {ADDED_MS:g} ms", f"{more:.2f} ms"
        what, met = "p50 over that of pass-through", more <= ADDED_MS
    elif cell.stream:
        times = _times(result, server, "server_cpu")
        wanted, measured = f"at most {STREAM_CPU:g} times", f"{times:.2f} times"
        what, met = "CPU over that of pass-through", times <= STREAM_CPU
    else:
        times = _times(result, server, "calls_per_s")
        wanted, measured = f"at least {OF_PLAIN_FEW:g} times", f"{times:.2f} times"
        what, met = "calls/s over those of pass-through", times >= OF_PLAIN_FEW
    whose = "" if server == OURS else f" ({server})"
    return Goal(f"{what}, {cell.name}{whose}", wanted, measured, met)


def _times(result: Result, server: str, what: str) -> float:
    theirs = result.median(PLAIN, what) or 0.0
    return (result.median(server, what) or 0.0) / theirs if theirs else float("inf")


def _throughput(results: Sequence[Result]) -> list[Goal]:
    found = []
    for result in results:
        cell = result.cell
        if cell.prompt_tokens != 8192 or cell.concurrency not in (32, 256) or cell.rate == 100:
            continue
        mine = result.median(OURS, "calls_per_s") or 0.0
        for peer, least in ((PLAIN, OF_PLAIN), (LITELLM, OF_LITELLM)):
            if peer not in result.rounds or (peer == LITELLM and cell.rate):
                continue
            theirs = result.median(peer, "calls_per_s") or 0.0
            share = mine / theirs if theirs else float("inf")
            found.append(
                Goal(
                    f"calls/s over those of {peer}, {cell.name}",
                    f"at least {least:g} times",
                    f"{share:.2f} times ({mine:.0f} to {theirs:.0f})",
                    share >= least,
                )
            )
    return found


def _workers(results: Sequence[Result]) -> list[Goal]:
    """Two workers beside one in the same rounds. CPU says what they would do with cores of their
    own: the engine and the load take the rest of these."""
    found = []
    for result in results:
        if OURS_TWO not in result.rounds or result.cell.rate is not None:
            continue  # the engine is the limit
        one, two = (result.median(name, "calls_per_s") or 0.0 for name in (OURS, OURS_TWO))
        cpu = [result.median(name, "server_cpu") or 0.0 for name in (OURS, OURS_TWO)]
        share = two / one if one else float("inf")
        found.append(
            Goal(
                f"calls/s of two workers over those of one, {result.cell.name}",
                f"at least {OF_ONE_WORKER:g} times",
                f"{share:.2f} times ({two:.0f} to {one:.0f}; {cpu[1]:.2f} and {cpu[0]:.2f} ms of"
                " CPU a call)",
                share >= OF_ONE_WORKER,
            )
        )
    return found


def _streams(results: Sequence[Result]) -> list[Goal]:
    found = []
    for result in results:
        cell = result.cell
        if cell.stream and cell.concurrency == 1000:
            bad = len(result.errors(OURS)) + (result.unfinished(OURS) if cell.rate else 0)
            found.append(Goal(f"errors, {cell.name}", "none", str(bad), bad == 0))
    return found
