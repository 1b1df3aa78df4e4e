"""The gate: when calls may reach the engine, and which policy version its tokens are.

The engine says nothing of versions in a chat completion, so the proxy stamps them. A weight
push goes: `hold` (new calls wait, short ones finish) -> the engine is paused and loads the
weights -> `set_version` (what arrives from now on is the new version) -> the engine resumes ->
`release`. A stream that is open all along gets one span of tokens a version. A call whose body
comes in one piece cannot be split: when a mark falls into it, its version is unknown.

Of several upstream servers each may have a version of its own: a push may change one after the
other, and one may serve a candidate (`Canary`). What is held then is one server, not the gate:
calls go to the others. A call's version is that of its source: the server that it was sent to, or
the candidate's adapter, which a server has beside the promoted one.

Everything runs on one event loop; nothing here is thread-safe, and nothing needs to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from hashlib import sha256
from types import TracebackType
from typing import Any, NamedTuple

from tracegrad.proxy.engine.fair_queue import FairQueue, QueueFull
from tracegrad.proxy.http.errors import Unavailable

log = logging.getLogger("tracegrad.proxy")

# Tokens sent before the engine paused may sit in a socket when a mark comes. The mark waits until
# nothing has arrived for so long, and for so many ticks in a row: each gives the loop a turn to
# read, however late it is. After weights that took longer to load these are a few milliseconds.
SETTLE_S = 0.03
SETTLE_TICK_S = 0.001
SETTLE_TICKS = 5
SETTLE_LIMIT_S = 1.0


# Where the trainer shares the engine's GPUs, a hold lasts for all of a step.
_HELD = "calls are held while new weights are trained or pushed"


class Canary(NamedTuple):
    """The share of rollouts that a candidate gets, and where it is: on a server of its own, or on
    every server, under the name of a LoRA adapter (`model`)."""

    upstream: str | None
    share: float
    model: str | None = None

    def has(self, rollout: str | None) -> bool:
        """By the rollout's name alone. A call without a name goes to what is promoted."""
        if rollout is None:
            return False
        drawn = int.from_bytes(sha256(f"canary\n{rollout}".encode()).digest()[:8])
        return drawn < self.share * 2.0**64


def canary_of(upstream: str | None, share: float, model: str | None = None) -> Canary | None:
    """None: neither a server nor a name is given, and there is no candidate."""
    return None if upstream is None and model is None else Canary(upstream, share, model)


class Admission:
    """One call's way through the gate, as an async context manager.

    `version` is the policy version at the time of entry, or of its source once it was sent.
    `version_unknown`, after the call: its tokens cannot be split by version.
    """

    __slots__ = (
        "_gate",
        "admitted",
        "blocked",
        "key",
        "model",
        "source",
        "streaming",
        "version",
        "version_unknown",
    )

    def __init__(self, gate: WeightUpdateGate, key: str | None, *, streaming: bool) -> None:
        self._gate = gate
        self.key = key
        self.streaming = streaming
        self.version = gate.version
        self.model: str | None = None  # the candidate's, where it is to get it by that name
        self.source: str | None = None  # of its tokens: the server that it was sent to, or `model`
        self.admitted = False  # let in, once
        self.version_unknown = False
        # Set while the client does not take what is sent: tokens may wait unread behind it.
        self.blocked = False

    def sent_to(self, upstream: str) -> None:
        """Again where that one did not answer: nothing has been sampled before."""
        self.source = self.model or upstream
        self.version = self._gate.version_at(self.source)
        self.version_unknown = False  # a change before that was of nothing

    def arrival_version(self) -> int:
        """The version of tokens that arrive now."""
        return self._gate.note_arrival(self.source)

    def gate_held_s(self) -> float:
        """As `WeightUpdateGate.held_s`."""
        return self._gate.held_s()

    async def __aenter__(self) -> Admission:
        await self._gate.enter(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate.leave(self)


class _Arrivals:
    """Of tokens, from one source or from all."""

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last = -SETTLE_S  # by the monotonic clock

    def add(self) -> None:
        self.count += 1
        self.last = time.monotonic()


class WeightUpdateGate:
    def __init__(
        self,
        version: int = 0,
        *,
        held: bool = False,
        lacks_version: bool = False,
        max_waiting: int = 4096,
        max_wait_s: float = 900.0,
    ) -> None:
        """`held`: nobody enters before a first `release`. `lacks_version`: which opens nothing as
        long as nobody has set a version, for `version` is not what the engine has. At most
        `max_waiting` calls wait, each at most `max_wait_s` seconds."""
        self.version = version
        self.versions: dict[str, int] = {}  # of sources that were given one of their own
        self.canary: Canary | None = None
        self.on_release: Callable[[], None] = lambda: None  # a held server takes calls again
        self._held_upstreams: dict[str, asyncio.TimerHandle] = {}
        self._arrivals = _Arrivals()
        self._arrivals_from: dict[str, _Arrivals] = {}
        self._held = held
        self._lacks_version = lacks_version
        self._held_since = time.monotonic()
        self._held_s = 0.0  # by holds that ended
        self.pushes = held  # whether weights are pushed to the engine
        self._inside: set[Admission] = set()
        self._waiting = FairQueue(max_waiting)
        self._max_wait_s = max_wait_s
        self._drained = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def admission(self, key: str | None = None, *, streaming: bool) -> Admission:
        """`key`: the rollout, or None for a call without a name; rollouts take turns."""
        return Admission(self, key, streaming=streaming)

    @property
    def held(self) -> bool:
        return self._held

    def version_at(self, source: str | None) -> int:
        """Of the weights of one source; None: of those that have no version of their own."""
        return self.version if source is None else self.versions.get(source, self.version)

    def holds(self, upstream: str) -> bool:
        """Whether that server is given no new calls."""
        return upstream in self._held_upstreams

    def held_s(self) -> float:
        """Seconds in which calls were held, since the start."""
        return self._held_s + (time.monotonic() - self._held_since if self._held else 0.0)

    @property
    def ended_holds_s(self) -> float:
        """Seconds of the holds that have ended."""
        return self._held_s

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "version": self.version,
            "held": self._held,
            "in_flight": len(self._inside),
            "waiting": len(self._waiting),
        }
        candidate = None if self.canary is None else self.canary.model
        if apart := sorted({*self.versions, *self._held_upstreams} - {candidate}):
            found["upstreams"] = {
                url: {"version": self.version_at(url), "held": self.holds(url)} for url in apart
            }
        if self.canary is not None:
            found["canary"] = {k: v for k, v in self.canary._asdict().items() if v is not None}
        if candidate is not None:
            found["canary"]["version"] = self.version_at(candidate)
        return found

    async def enter(self, admission: Admission) -> None:
        """Raises Unavailable when too many calls wait already, or this one has for too long."""
        deadline = asyncio.get_running_loop().time() + self._max_wait_s if self._held else 0.0
        while self._held:
            await self._wait(admission, deadline - asyncio.get_running_loop().time())
        admission.version = self.version
        if self.canary is not None and self.canary.has(admission.key):
            admission.model = self.canary.model
        admission.admitted = True
        self._inside.add(admission)

    async def _wait(self, admission: Admission, seconds: float) -> None:
        try:
            await self._waiting.wait(admission.key, seconds)
        except QueueFull:
            waiting = f"{len(self._waiting)} calls wait already"
            raise Unavailable(f"{_HELD}, and {waiting}", code="busy") from None
        except TimeoutError:
            waited = f"this call has waited {self._max_wait_s:g} s (proxy.max_wait_s)"
            raise Unavailable(f"{_HELD}, and {waited}", code="busy") from None

    def leave(self, admission: Admission) -> None:
        self._inside.discard(admission)
        self._drained.set()  # for whoever waits to look again

    async def hold(self, *, ttl_s: float, drain_s: float, upstream: str | None = None) -> int:
        """New calls wait; of one `upstream`: they go to others. Returns the number of calls inside
        once those that come in one piece have finished, or `drain_s` seconds later. A hold opens by
        itself after `ttl_s`."""
        self.pushes = True
        if upstream is not None:
            self._hold_upstream(upstream, ttl_s)
        else:
            if not self._held:
                self._held_since = time.monotonic()
            self._held = True
            self._restart_timer(ttl_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._is_held(upstream) and any(
                    not each.streaming for each in self._of(upstream)
                ):
                    self._drained.clear()
                    await self._drained.wait()
        return len(self._of(upstream))

    async def set_version(
        self, version: int, upstream: str | None = None, model: str | None = None
    ) -> None:
        """Tokens that arrive from now on are `version`; of one `upstream`, or of the candidate
        `model`: those from there. To be called while the engine is paused; of all, after each was
        given that version, at any time.
        """
        source = model or upstream
        if self._changing(version, source):
            await self._settle(source)
        for admission in self._changing(version, source):
            admission.version_unknown = (
                admission.version_unknown or admission.blocked or not admission.streaming
            )
        if source is None:
            self.version = version
            self.versions.clear()
            self._lacks_version = False
        else:
            self.versions[source] = version

    def set_canary(self, canary: Canary | None) -> None:
        """From now on that server gets calls of its share of rollouts, and no others; or that share
        gets the candidate by its name. None: there is no candidate, and calls that have its name
        get what all others do."""
        if canary is None and self.canary is not None and self.canary.model is not None:
            self.versions.pop(self.canary.model, None)
        self.canary = canary

    def release(self, upstream: str | None = None) -> None:
        """Waiting calls go on; rollouts take turns, each with its calls in order. Of one
        `upstream`: it is given calls again."""
        for url in [upstream] if upstream is not None else list(self._held_upstreams):
            if (timer := self._held_upstreams.pop(url, None)) is not None:
                timer.cancel()
        self.on_release()
        if upstream is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lacks_version:
            log.warning("a release came before any policy version was set: calls are still held")
            return
        self._held_s, self._held = self.held_s(), False
        self._drained.set()
        self._waiting.release()

    def note_arrival(self, source: str | None = None) -> int:
        """Tokens arrived; the version that they are of."""
        self._arrivals.add()
        if source is None:
            return self.version
        self._from(source).add()
        return self.versions.get(source, self.version)

    def _of(self, source: str | None) -> list[Admission]:
        """Calls inside, or those of them that get their tokens from there."""
        if source is None:
            return list(self._inside)
        return [each for each in self._inside if each.source == source]

    def _changing(self, version: int, source: str | None) -> list[Admission]:
        """But for those whose source was given that version before. One without a version of its
        own may have other weights under the same number, as those of a run before."""
        return [
            each
            for each in self._of(source)
            if each.source is None or self.versions.get(each.source) != version
        ]

    def _is_held(self, upstream: str | None) -> bool:
        return self._held if upstream is None else self.holds(upstream)

    def _from(self, source: str | None) -> _Arrivals:
        if source is None:
            return self._arrivals
        if (found := self._arrivals_from.get(source)) is None:
            found = self._arrivals_from[source] = _Arrivals()
        return found

    async def _settle(self, source: str | None) -> None:
        arrivals = self._from(source)
        limit = time.monotonic() + SETTLE_LIMIT_S
        quiet = 0
        while (now := time.monotonic()) < limit:
            if quiet >= SETTLE_TICKS and now - arrivals.last >= SETTLE_S:
                return
            seen = arrivals.count
            await asyncio.sleep(SETTLE_TICK_S)
            quiet = quiet + 1 if arrivals.count == seen else 0

    def _hold_upstream(self, upstream: str, ttl_s: float) -> None:
        if (timer := self._held_upstreams.get(upstream)) is not None:
            timer.cancel()
        self._held_upstreams[upstream] = asyncio.get_running_loop().call_later(
            ttl_s, self._expire_upstream, upstream, ttl_s
        )

    def _expire_upstream(self, upstream: str, ttl_s: float) -> None:
        log.error(
            "a weight push kept calls from %s for %g s without a release; it is given calls again",
            *(upstream, ttl_s),
        )
        self.release(upstream)

    def _restart_timer(self, ttl_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(ttl_s, self._expire, ttl_s)

    def _expire(self, ttl_s: float) -> None:
        log.error(
            "a weight push held calls for %g s without a release; %d waiting calls %s",
            *(ttl_s, len(self._waiting), "wait on" if self._lacks_version else "go on"),
        )
        self.release()
