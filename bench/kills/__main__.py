"""`python -m bench.kills`: the demo's task while its processes are killed at random moments. Writes
docs/bench-kills.md."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.kills.killer import VICTIMS
from bench.kills.run import Outcome, run
from bench.pages import clock, parser_of, publish
from bench.proxy.machine import description
from bench.tables import Goal, goal_table, markdown, number

KILLS, QUICK = 105, 7

_HEAD = """# Kills

The shop of `make demo` learns while a process of it is killed with SIGKILL, again and again: vLLM's
server or engine process, the proxy, a rank, the PostgreSQL server of the store (with all its
processes, and started again at once), or `trainer serve` itself, which a parent starts again and
whose port it keeps open, as an init system does. The next kill comes half a second to eight
seconds after everything is up again. Agents are the demo's: OpenAI's client with its two retries,
whole answers, and a rollout that meets an error all the same is tried again, up to three times.
Beside them two people read streams of 100 tokens, one after the other, with a client that retries
nothing: it sees each that breaks.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("kills", __doc__, quick=f"{QUICK} kills")
    parser.add_argument("--kills", type=int, default=None, help=f"default: {KILLS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120, help="after which none are killed")
    options = parser.parse_args(arguments)
    kills = options.kills or (QUICK if options.quick else KILLS)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), kills, options.seed, options.minutes, clock())
    publish(page(found), options)
    return 0


def page(found: Outcome) -> str:
    parts = [
        _HEAD,
        "\n".join(f"- {line}" for line in description(["vllm", "torch"])),
        f"- {datetime.now(UTC):%Y-%m-%d}, {found.seconds / 60:.0f} minutes of kills",
        "",
        goal_table(goals(found)),
        by_victim(found),
        "",
        streams_by_victim(found),
    ]
    return "\n".join(parts)


def goals(found: Outcome) -> list[Goal]:
    calls = found.calls
    made = len(calls.answered) + sum(calls.failed.values())
    failed = ", ".join(f"{name} {n}" for name, n in calls.failed.items()) or "none"
    left = sum(found.unfinished.values())
    streams = found.streams.broken_by(found.kills)
    engines = [streams.get(victim, (0, 0)) for victim in ("vllm", "engine")]
    hit, broken = (sum(each) for each in zip(*engines, strict=True))
    return [
        Goal("kills", f"{KILLS}", f"{len(found.kills)}", len(found.kills) >= KILLS),
        Goal("calls that failed for an agent", "none", f"{failed}, of {made:,}", not calls.failed),
        Goal(
            "streams that broke as vLLM's server or engine was killed",
            "none",
            f"{broken} of {hit}; {found.streams.short} of all ended short",
            not broken and not found.streams.short,
        ),
        Goal("answers lost", "none", str(found.lost), not found.lost),
        Goal(
            "steps in order, each turn trained once",
            "yes",
            f"{found.steps} steps",
            found.numbers_right,
        ),
        Goal(
            "greedy success on held-out tasks",
            "rises",
            f"{found.before:.2f} to {found.after:.2f}",
            found.after > found.before,
        ),
        Goal(
            "a call's latency, median and longest",
            "latency",
            f"{number(found.median_s)} s and {number(found.slowest_s)} s; {left} turns not looked"
            " at in the end",
            True,
        ),
    ]


def by_victim(found: Outcome) -> str:
    rows = []
    for victim in VICTIMS:
        of = [kill for kill in found.kills if kill.victim == victim]
        if not of:
            continue
        up = [kill.up_again_s for kill in of]
        doing = sorted({kill.doing for kill in of})
        rows.append(
            [
                victim,
                str(len(of)),
                ", ".join(doing),
                number(statistics.median(up)),
                number(max(up)),
            ]
        )
    header = ["victim", "kills", "while the ranks were", "up again, median s", "longest s"]
    return markdown(header, rows)


def streams_by_victim(found: Outcome) -> str:
    streams = found.streams.broken_by(found.kills)
    rows = [
        [victim, f"{streams[victim][0]:,}", f"{streams[victim][1]:,}"]
        for victim in [*VICTIMS, "several"]
        if victim in streams
    ]
    errors = sum(one.error is not None for one in found.streams.read)
    within = sum(broken for _, broken in streams.values())
    read = f"{len(found.streams.read):,} were read, {errors - within:,} broke in the middle of none"
    table = markdown(["killed in the middle of a stream", "streams", "broke"], rows)
    return f"Streams: {read}.\n\n{table}"


if __name__ == "__main__":
    sys.exit(main())
