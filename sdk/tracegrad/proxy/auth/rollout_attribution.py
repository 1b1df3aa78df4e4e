"""Which rollout a call belongs to.

First match wins: URL path, header `x-tracegrad-rollout`, API key of a rollout, W3C `baggage`, and
the rollout that the trace of a W3C `traceparent` is known to belong to. A call without any of
them is attributed later, by what its prompt continues.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import unquote

from cachetools import FIFOCache

from tracegrad.protocol import (
    AGENT_HEADER,
    ROLLOUT_ATTRIBUTE,
    ROLLOUT_HEADER,
    ROLLOUT_ID_PATTERN,
    STATE_HEADER,
    agent_of_header,
)
from tracegrad.proxy.http.errors import BadRequest
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.task_ids import state_key

MOST_TRACES = 10_000  # whose rollouts are known

_id = re.compile(ROLLOUT_ID_PATTERN)
# All zeros and version ff are W3C's words for "none".
_traceparent = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}"
)


@dataclass(frozen=True, slots=True)
class CallOwner:
    """`rollout_id` is None for a call without a name, `state_key` for one without a state,
    `agent_name` for one that does not say which agent calls.
    `is_named`: the call names the rollout itself; else it is known by what the call belongs to."""

    rollout_id: str | None
    trace_id: str | None = None
    parent_span_id: str | None = None
    state_key: str | None = None  # of the environment that the call is made in
    agent_name: str | None = None
    is_named: bool = False


def attribute_call(
    headers: Mapping[str, str],
    path_id: str | None,
    key_id: str | None,
    traces: TraceIndex,
) -> CallOwner:
    """The owner of a request whose path names `path_id` and whose API key `key_id`.

    Headers have lower-case names. Raises BadRequest for an id that no rollout can have.
    """
    trace_id, span_id = _trace(headers.get("traceparent"))
    said = CallOwner(
        None,
        trace_id,
        span_id,
        state_key(headers.get(STATE_HEADER) or None),
        agent_of_header(headers.get(AGENT_HEADER)),
    )
    found = (
        ("path", path_id),
        (ROLLOUT_HEADER, headers.get(ROLLOUT_HEADER)),
        ("api key", key_id),
        ("baggage", _from_baggage(headers.get("baggage"))),
    )
    for where, rollout_id in found:
        if rollout_id:
            if not is_rollout_id(rollout_id):
                raise BadRequest(
                    f"{where}: {rollout_id[:40]!r} is no rollout id: use at most 128 letters, "
                    "digits and . _ : @ -",
                    param=where,
                )
            return replace(said, rollout_id=rollout_id, is_named=True)
    known = traces.rollout_of(trace_id) if trace_id is not None else None
    return replace(said, rollout_id=known)


def is_rollout_id(text: str) -> bool:
    return _id.fullmatch(text) is not None


def _from_baggage(baggage: str | None) -> str | None:
    if baggage is None or ROLLOUT_ATTRIBUTE not in baggage:
        return None
    for member in baggage.split(","):
        pair, _, _ = member.partition(";")
        key, _, value = pair.partition("=")
        if key.strip() == ROLLOUT_ATTRIBUTE:
            return unquote(value.strip())
    return None


def _trace(traceparent: str | None) -> tuple[str | None, str | None]:
    match = _traceparent.match(traceparent) if traceparent else None
    return (match[1], match[2]) if match else (None, None)


class TraceIndex:
    """Which rollout each trace belongs to, for the traces seen last.

    A trace that is seen with two rollouts, as when one span of the user's goes around many,
    belongs to none: it says nothing of a call.
    """

    def __init__(self, limit: int = MOST_TRACES, others: SharedLog | None = None) -> None:
        """`others`: the other workers of the proxy."""
        self._rollouts: FIFOCache[str, str | None] = FIFOCache(limit)
        self._others = others
        if others is not None:
            others.subscribe("trace", self._add)

    def add(self, trace_id: str | None, rollout_id: str | None) -> None:
        if trace_id is None or rollout_id is None:
            return
        if self._add(trace_id, rollout_id) and self._others is not None:
            self._others.publish("trace", trace_id, rollout_id)

    def _add(self, trace_id: str, rollout_id: str) -> bool:
        """Whether it says anything new."""
        new = trace_id not in self._rollouts
        known = self._rollouts.get(trace_id, rollout_id)
        now = self._rollouts[trace_id] = rollout_id if known == rollout_id else None
        return new or known != now

    def rollout_of(self, trace_id: str) -> str | None:
        return self._rollouts.get(trace_id)

    def knows(self, trace_id: str) -> bool:
        """Whether it was seen with any rollout, or with several."""
        return trace_id in self._rollouts
