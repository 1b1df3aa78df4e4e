"""Rollouts that ended with a reward: did any LLM call reach the proxy as theirs?

A reward without a call trains nothing, and the agent works all the same. Only the proxy knows: no
process sees what another one calls, or a client that opens its own socket. It says so where it
takes a rollout's end, and those without any call are asked for once more, when calls that are
reported by spans have had time to arrive. What is missing then is warned of, once for each traced
function of a process.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("tracegrad")

# OpenTelemetry's own exporters send what they have every 5 s.
GRACE_S = 10.0
MOST_WATCHED = 1_000  # ended rollouts whose calls are not known; of more the oldest are let go
MOST_ASKED = 100  # in one request
# An agent that has one of these may report its calls later than its rollout's end.
_SPAN_EXPORTERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRollout:
    """A rollout that ended with a reward. `may_have_calls`: as far as this process saw, which
    counts where the proxy does not say. `environ`: whether it had the environment."""

    rollout_id: str
    name: str
    environ: bool
    may_have_calls: bool
    ended_at: float = field(default_factory=time.monotonic)


class CallCheck:
    """Of the rollouts of one process at the proxy `url`. Any thread and signal handler may `watch`;
    the exporter's thread does the rest."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.RLock()
        self._watched: dict[str, RewardedRollout] = {}
        self._warned: set[str] = set()

    def watch(self, ended: RewardedRollout) -> None:
        """To be called before the rollout's end is put."""
        with self._lock:
            if ended.name not in self._warned:
                self._watched[ended.rollout_id] = ended
                if len(self._watched) > MOST_WATCHED:
                    del self._watched[next(iter(self._watched))]

    def answered(self, answer: bytes) -> None:
        """What the proxy says to events: nobody asks again about rollouts that have calls."""
        with self._lock:
            for rollout_id, (calls, _) in (_counts(answer) or {}).items():
                if calls:
                    self._watched.pop(rollout_id, None)

    def due(self, *, hurry: bool) -> list[str]:
        """Rollouts to ask for. `hurry`: somebody waits, and might end the process then."""
        hurry = hurry and not any(name in sys.modules for name in _SPAN_EXPORTERS)
        latest = time.monotonic() - (0.0 if hurry else GRACE_S)
        with self._lock:
            due = [each.rollout_id for each in self._watched.values() if each.ended_at <= latest]
        return due[:MOST_ASKED]

    def decide(self, asked: list[str], answer: bytes) -> None:
        """`answer`: the proxy's to the question for `asked`, which are settled by it."""
        counts = _counts(answer)
        for rollout_id in asked:
            with self._lock:
                ended = self._watched.pop(rollout_id, None)
                if ended is None or ended.name in self._warned:
                    continue
                if counts is None:  # a proxy of before this question
                    missing, unnamed = not ended.may_have_calls, None
                else:
                    calls, unnamed = counts.get(rollout_id, (1, 0))
                    missing = not calls
                if missing:
                    self._warned.add(ended.name)
            if missing:
                _log.warning("%s", self._warning(ended, unnamed))

    def _warning(self, ended: RewardedRollout, unnamed: int | None) -> str:
        """`unnamed`: calls without a rollout's name that came meanwhile; None: not known."""
        base = f"{self._url}/v1"
        seen = f"no LLM call to {self._url} was " + ("seen in it" if unnamed is None else "its own")
        if unnamed:
            calls = "1 call" if unnamed == 1 else f"{unnamed} calls"
            seen += f"; {calls} came to the plain address {base} meanwhile, which names no rollout"
        if ended.environ:
            fix = (
                "Its client does not follow the environment: it was made before the rollout, or is "
                "given an address. Make it inside, without one; or open the rollout by `with "
                "tracegrad.rollout(...) as rollout` and give it base_url=rollout.base_url"
            )
        else:
            which = "A client" if unnamed else f"Give the agent's client the base URL {base}. One"
            fix = (
                f"{which} that sends by other means than httpx, requests or aiohttp needs the "
                "rollout's own: pass base_url=rollout.base_url to it, or open the rollout with "
                "environ=True where it reads OPENAI_BASE_URL; another process gets "
                "env=rollout.environ"
            )
        return (
            f"rollout {ended.rollout_id} ({ended.name}) ended with a reward, and {seen}: nothing "
            f"of it can be trained. {fix}. This warning comes once for {ended.name}"
        )


def question(rollout_ids: list[str]) -> bytes:
    """The body of `POST /api/events` that asks for their calls."""
    return json.dumps({"events": [], "calls_of": rollout_ids}).encode()


def _counts(answer: bytes) -> dict[str, tuple[int, int]] | None:
    """Calls by rollout, and calls without a name; None where the answer does not say."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):  # another proxy's words
        found: Any = json.loads(answer)
        if "calls" in found:
            return {
                str(each["rollout_id"]): (int(each["calls"]), int(each.get("unnamed_calls", 0)))
                for each in found["calls"]
            }
    return None
