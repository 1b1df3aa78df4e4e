"""The variables of the environment that tracegrad reads, beside those that are settings of the
proxy (`TRACEGRAD_PROXY_...`) or of the trainer (`TRACEGRAD_TRAINER_...`).

docs/settings.md has them; a test holds them against the code that reads them.
"""

from __future__ import annotations

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
INTERNAL_VARIABLES = frozenset({"TRACEGRAD_DIE_WITH_PARENT", "TRACEGRAD_FORK_ENGINE"})
