"""The run as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from bench.store.batch import Batch
from bench.store.goals import FLAT, at_ten_million, goals
from bench.store.growth import Growth
from bench.store.sizes import Common, Size
from bench.store.traffic import Traffic
from bench.tables import goal_table, markdown, number

_INTRODUCTION = """\
# What the store costs

Written by `make bench-store`; do not edit. SQLite is a file, PostgreSQL a server on the same
machine that is reached by a Unix socket, with its settings as they come; both flush every commit
to the disk before it is acknowledged. Ids are spread as a large tokenizer's, log-probabilities are
random, texts are English and source code; a request holds its whole conversation, as clients
send it. Clients, store and database share the cores.
"""
_TRAFFIC = """\
Writers are threads of one process that wait for each turn's commit before they write the next.
A rollout is read whole, with all requests and responses, or *lean*, as a trainer reads it: with
tokens only, of which every turn has all of its prompt. CPU is milliseconds a turn of the process
with the store in it: PostgreSQL's server is not in it.
"""
_SIZES = """\
How much the database grew, indexes and all, over the tokens that no earlier turn has: new ones of
prompts, for which an id is stored, and sampled ones, with an id and a log-probability.
"""
_SHARED = """\
What an agent says with each call, its system prompt and tools, most of its rollouts have in common:
long texts that come again in another rollout are stored once.
"""
_GROWTH = """\
Small turns, ten a rollout, written in large transactions; all but the newest rollouts were
trained by steps of 256 rollouts. There is a store of each size; they are measured in turns, so
that what else the machine does hits all alike. Milliseconds, medians; how much longer it takes in
the largest is the median of the rounds' own. The last column is reckoned: what is flat goes on
with the logarithm of the number of turns, as trees of an index do, what grows on a straight line.
"""
# As they were published, or measured on other machines, with other work: no comparison.
_OTHERS = """\
## What others publish

For orientation only: other machines, other units, other work. A rollout of theirs is a whole task,
from its queue to its end; what is counted above is a turn, stored.

- **Agent-lightning 0.3.0**, store benchmark of its changelog, on Azure machines with 32 to 64
  cores, rollouts/s: 32 runners of 6 turns, 9.06 in memory and 8.71 with MongoDB (0.2.2: 8.73);
  100 of 10, 23.26 and 32.79; 300 of 6, 24.42 and 40.24; 1,000 of 3, 14.60 and 50.05; its queue
  alone, 256 of 4, 30.86 and 57.01. So 1,000 runners of 3 turns are some 150 turns/s with MongoDB.
  Version 1 keeps everything in memory and publishes no such figures.
- **rLLM** publishes no rates of its gateway. Its pull requests mention some 50 GB a worker in the
  memory store, about 36 bytes a token (#787), and of an event loop that lags 41 s at the 99th
  percentile with about 2,500 sessions and 89,000 traces (#731). Measured for this project on two
  shared cores: with its SQLite store a row of an 8k prompt and 512 tokens is 244 kB, 28 bytes a
  token with its text, and the gateway passes 49 calls/s at 32 at once (38 with its memory store).
"""


def page(
    *,
    made: Sequence[str],
    machine: Sequence[str],
    traffic: Sequence[Traffic],
    sizes: Sequence[Size],
    shared: Sequence[Common],
    batches: Sequence[Batch],
    growths: Sequence[Growth],
) -> str:
    return "\n".join(
        [
            _INTRODUCTION,
            "\n".join(f"- {line}" for line in (*made, *machine)) + "\n",
            "## Goals\n",
            goal_table(goals(traffic, sizes, batches, growths)),
            "## Turns in and out\n",
            _TRAFFIC,
            _traffic(traffic),
            "## Bytes\n",
            _SIZES,
            _sizes(sizes),
            _SHARED,
            _shared(shared),
            "## A training batch\n",
            _batches(batches),
            "## As a store grows\n",
            _GROWTH,
            *(_growth(growth) for growth in growths),
            "## Query plans\n",
            "Of the statements above that read, at the largest size, each where it comes first.\n",
            *(_plans(growth) for growth in growths),
            _OTHERS,
        ]
    )


def _traffic(traffic: Sequence[Traffic]) -> str:
    header = ["", "threads", "turns/s in", "wait p50, ms", "p95, ms", "CPU in, ms"]
    header += ["turns/s out", "CPU out, ms", "lean turns/s out", "CPU lean, ms"]
    parts = []
    for shape in dict.fromkeys(one.cell.shape for one in traffic):
        rows = [
            [
                one.place,
                str(one.cell.threads),
                number(one.written.turns_per_s),
                number(one.written.p50_ms),
                number(one.written.p95_ms),
                number(one.written.cpu_ms),
                number(one.read.turns_per_s),
                number(one.read.cpu_ms),
                number(one.lean.turns_per_s),
                number(one.lean.cpu_ms),
            ]
            for one in traffic
            if one.cell.shape == shape
        ]
        parts += [f"{shape.words}.\n", markdown(header, rows)]
    return "\n".join(parts)


def _sizes(sizes: Sequence[Size]) -> str:
    header = ["", "rollouts", "turns", "unique tokens", "bytes a token", "kB a turn"]
    rows = [
        [
            one.place,
            one.shape.words,
            f"{one.turns:,}",
            f"{one.tokens:,}",
            number(one.per_token),
            number(one.bytes_without_text / one.turns / 1e3),
            number(one.bytes_with_text / one.turns / 1e3),
        ]
        for one in sizes
    ]
    return markdown([*header, "kB a turn with its text"], rows)


def _shared(shared: Sequence[Common]) -> str:
    header = ["", "rollouts", "said with each call, kB", "kB a rollout, where no two say the same"]
    rows = [
        [
            one.place,
            f"{one.rollouts:,} ({one.shape.words})",
            number(one.said / 1e3),
            number(one.bytes_other / 1e3),
            number(one.bytes_same / 1e3),
        ]
        for one in shared
    ]
    return markdown([*header, "where all do"], rows)


def _batches(batches: Sequence[Batch]) -> str:
    rows = [
        [
            one.place,
            f"{one.rollouts:,}",
            f"{one.turns:,}",
            f"{one.unique_tokens:,}",
            f"{one.last_context:,}",
            f"{one.seconds:.2f}",
            number(one.turns_per_s),
        ]
        for one in batches
    ]
    header = ["", "rollouts", "turns", "unique tokens", "tokens of the last context"]
    return markdown([*header, "lease and load, s", "turns/s"], rows)


def _growth(growth: Growth) -> str:
    header = [growth.place, *(f"{turns:,} turns" for turns in growth.sizes)]
    rows = [
        [
            operation.name,
            *map(number, growth.medians(operation)),
            f"{growth.times(operation):.2f}",
            number(at_ten_million(growth, operation)),
        ]
        for operation in growth.rounds
    ]
    rows.append(["*MB on the disk*", *(number(size / 1e6) for size in growth.bytes), "", ""])
    last = f"{growth.sizes[-1]:,} over {growth.base:,}"
    note = f"Filled with {growth.fill_turns_per_s:,.0f} turns/s, their training included.\n"
    return f"{note}\n{markdown([*header, last, 'at 10,000,000'], rows)}"


def _plans(growth: Growth) -> str:
    growing = {operation.name for operation in growth.rounds if growth.times(operation) > FLAT}
    parts = [f"<details><summary>{growth.place}</summary>\n"]
    operation = ""
    for plan in growth.plans:
        if plan.operation != operation:
            operation = plan.operation
            parts.append(f"**{operation}**" + (" (grows)" if operation in growing else "") + "\n")
        parts.append("```\n" + "\n".join((plan.statement, *plan.lines)) + "\n```\n")
    return "\n".join([*parts, "</details>\n"])
