"""The run as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.proxy.endurance import PROMPT_TOKENS, TURN_TOKENS, Memory, Stored
from bench.proxy.peers import DIRECT
from bench.proxy.rounds import Result
from bench.tables import Goal, goal_table, markdown, number

_INTRODUCTION = """\
# What the proxy costs

Written by `make bench-proxy`; do not edit. All servers stand before the same mock engine and are
measured in one run, in turns. **direct** is the engine itself; **pass-through** is the plainest
proxy that the same libraries make (uvicorn, uvloop, httptools, aiohttp; nothing is read);
**tracegrad** is `tracegrad proxy` with its store on the disk, **2 workers** the same with
`--workers 2`; **LiteLLM** is its proxy with one
worker, without a database, a key to check, or a log.

Prompts differ from call to call, and come again as those of attempts at one task do; 512 tokens are
generated. Without being asked the engine answers with text only; tracegrad asks it for all token
ids and log-probabilities, which make an answer to an 8k prompt some 110 kB instead of 3, and
commits them to the disk before its client sees the end. Times *added* are over direct in the same
round, the median of the rounds. CPU is milliseconds a call of the server's own processes: of all
columns it depends least on what else the machine did. The load generator, the engine and the server
share the cores.
"""


def page(
    *,
    made: Sequence[str],
    machine: Sequence[str],
    goals: Sequence[Goal],
    at_once: Sequence[Result],
    at_a_rate: Sequence[Result],
    with_tokens: Sequence[Result],
    memory: Memory,
    stored: Stored,
) -> str:
    parts = [
        _INTRODUCTION,
        "\n".join(f"- {line}" for line in (*made, *machine)) + "\n",
        "## Goals\n",
        goal_table(goals),
        "## An engine that is the limit\n",
        "The engine gives so many calls a second, whatever the concurrency: with 512 tokens a call,"
        " 100 calls/s are 51,200 tokens/s. A stream's tokens come one at a time. Callers of whole"
        " answers pause for a quarter of their time, unevenly, as agents do whose tools run:"
        " without pauses they end up in step, and all wait for all.\n",
        _table(at_a_rate),
        "## An engine that answers at once\n",
        "What each can do at most; with more than one caller the time added is mostly the queue.\n",
        "### Whole answers\n",
        _table([result for result in at_once if not result.cell.stream]),
        "### Streams, a chunk a token\n",
        _table([result for result in at_once if result.cell.stream]),
        "## Callers that ask for the tokens themselves\n",
        "Token ids and log-probabilities, which is what capturing with another proxy takes: every"
        " server has the same answer to carry, and tracegrad keeps it too.\n",
        _table(with_tokens),
        "## Memory\n",
        _memory(memory),
        "## Bytes stored\n",
        _stored(stored),
    ]
    return "\n".join(parts)


def _table(results: Sequence[Result]) -> str:
    header = ["prompt", "callers", "server", "calls/s", "added p50, ms", "added p95, ms"]
    streams = any(result.cell.stream for result in results)
    header += ["first words +p50, ms", "first words +p95, ms"] if streams else []
    header += ["CPU, ms/call", "errors"]
    rated = any(result.cell.rate for result in results)
    rows = []
    for result in results:
        cell = result.cell
        for server in result.rounds:
            row = [f"{cell.prompt_tokens:,}", f"{cell.concurrency:,}", server]
            row += [number(result.median(server, "calls_per_s"))]
            row += [_added(result, server, what) for what in ("p50", "p95")]
            if streams:
                firsts = ("first_p50", "first_p95")
                row += [_added(result, server, what) if cell.stream else "" for what in firsts]
            row += [number(result.median(server, "server_cpu")), _errors(result, server)]
            rows.append([_engine(result), *row] if rated else row)
    return markdown(["engine", *header] if rated else header, rows)


def _engine(result: Result) -> str:
    kind = "streams" if result.cell.stream else "whole"
    return f"{kind}, {result.cell.rate:g}/s" if result.cell.rate else f"{kind}, at once"


def _added(result: Result, server: str, what: str) -> str:
    if server == DIRECT:
        own = result.median(server, what)
        return "" if own is None else f"({number(own)})"
    added = result.added(server, what)
    return "" if added is None else f"{'+' if added >= 0 else ''}{number(added)}"


def _errors(result: Result, server: str) -> str:
    found = Counter(result.errors(server))
    words = [f"{count} x {error}" for error, count in found.most_common(2)]
    if cut := result.unfinished(server):
        words.append(f"{cut} not finished in time")
    return "; ".join(words) or "0"


def _memory(memory: Memory) -> str:
    rows = [[f"{calls:,}", f"{rss / (1 << 20):.0f}"] for calls, rss in memory.samples]
    note = f"{PROMPT_TOKENS:,} prompt tokens, whole answers; {len(memory.errors)} errors.\n\n"
    return note + markdown(["calls", "resident, MiB"], rows)


def _stored(stored: Stored) -> str:
    turns = [("1", stored.first)]
    turns += [(str(at + 2), size) for at, size in enumerate(stored.later)]
    note = (
        f"Growth of the database file a turn: {PROMPT_TOKENS:,} prompt tokens first, then"
        f" {TURN_TOKENS} more with every turn.\n\n"
    )
    return note + markdown(["turn", "kB"], [[turn, f"{size / 1e3:.1f}"] for turn, size in turns])
