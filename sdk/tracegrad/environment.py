"""The variables of the environment that tracegrad reads, beside those that are settings of the
proxy (`TRACEGRAD_PROXY_...`) or of the trainer (`TRACEGRAD_TRAINER_...`).

docs/settings.md has them; a test holds them against the code that reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    default: str
    what: str


# Of an agent's process: the SDK.
SDK_VARIABLES = {
    "TRACEGRAD_URL": Variable(
        default="http://127.0.0.1:4141",
        what="the proxy's address: scheme, host and port, without /v1",
    ),
    "TRACEGRAD_API_KEY": Variable(
        default="none",
        what="the proxy's admin key, which the SDK's own requests carry; of the proxy itself the"
        " key that it asks for, 16 characters or more",
    ),
    "TRACEGRAD_TAGS": Variable(
        default="none", what="tags of every rollout of this process: key=value,key2=value2"
    ),
    "TRACEGRAD_HELD_OUT": Variable(
        default="0",
        what="1: every rollout of this process is held out: for evaluation, and never trained",
    ),
    "TRACEGRAD_INSTRUMENT": Variable(
        default="0",
        what="1: the spans of each installed agent framework are turned on where it is imported, as"
        " `instrument()` does; or names of frameworks, with commas between",
    ),
    "TRACEGRAD_JOURNAL": Variable(
        default="$XDG_STATE_HOME/tracegrad/journal, else ~/.local/state/tracegrad/journal",
        what="folder of the events that have not reached the proxy yet",
    ),
    "TRACEGRAD_JOURNAL_BYTES": Variable(
        default="1073741824", what="most that the journals for one proxy may hold, in bytes"
    ),
}

# Of the programs: `tracegrad`, `trainer`.
PROGRAM_VARIABLES = {
    "TRACEGRAD_STORE": Variable(
        default="sqlite:///.tracegrad/store.db",
        what="SQLAlchemy URL of the store, of the proxy and of every command that has --store",
    ),
    "VLLM_API_KEY": Variable(
        default="none", what="the key of an engine that asks for one (its --api-key)"
    ),
}

# That one program of ours sets for another; nobody else need.
INTERNAL_VARIABLES = frozenset(
    {
        "TRACEGRAD_ADAPTER",
        "TRACEGRAD_DIE_WITH_PARENT",
        "TRACEGRAD_FORK_ENGINE",
        "TRACEGRAD_LOG_FORMAT",
        # Of commands in sandboxes: agents, and what scores them.
        "TRACEGRAD_CLEARING",
        "TRACEGRAD_EXIT_CODE",
        "TRACEGRAD_MIRROR",
        "TRACEGRAD_OUTPUT",
        "TRACEGRAD_REWARD_OF",
        "TRACEGRAD_ROLLOUT_ID",
        "TRACEGRAD_TASK_ID",
    }
)

_PREFIX = "TRACEGRAD_"
# Of settings: `settings_sources.unknown_variables` knows their names.
_SETTINGS = ("TRACEGRAD_PROXY_", "TRACEGRAD_TRAINER_")
_TESTS = "TRACEGRAD_TEST_"  # this project's own


def unread_variables(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A line for each variable that looks like one of ours, no setting's, and that nothing reads.
    It is passed over, and not refused: it may be another version's."""
    known = {*SDK_VARIABLES, *PROGRAM_VARIABLES, *INTERNAL_VARIABLES}
    for name in sorted(environ):
        if name.upper().startswith(_PREFIX) and name not in known:
            if name.upper().startswith((*_SETTINGS, _TESTS)):
                continue
            meant = _meant(name.upper())
            yield f"{name}: nothing reads this variable{f'; did you mean {meant}?' * bool(meant)}"


def _meant(name: str) -> str | None:
    from difflib import get_close_matches  # of agents' processes few have one

    rest = name.removeprefix(_PREFIX)
    rests = {each.removeprefix(_PREFIX): each for each in (*SDK_VARIABLES, *PROGRAM_VARIABLES)}
    if close := get_close_matches(rest, rests, n=1):
        return rests[close[0]]
    table, _, setting = rest.partition("_")
    tables = {each.removeprefix(_PREFIX).rstrip("_"): each for each in _SETTINGS}
    if setting and (close := get_close_matches(table, tables, n=1)):
        return f"{tables[close[0]]}{setting}"
    return None
