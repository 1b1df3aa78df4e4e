"""The gate: when calls may reach the engine, and which policy version its tokens are.

The engine says nothing of versions in a chat completion, so the proxy stamps them. A weight
push goes: `hold` (new calls wait, short ones finish) -> the engine is paused and loads the
weights -> `set_version` (what arrives from now on is the new version) -> the engine resumes ->
`release`. A stream that is open all along gets one span of tokens a version. A call whose body
comes in one piece cannot be split: when a mark falls into it, its version is unknown.

Everything runs on one event loop; nothing here is thread-safe, and nothing needs to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from types import TracebackType

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


class Admission:
    """One call's way through the gate, as an async context manager.

    `version` is the policy version at the time of entry. `version_unknown`, after the call: its
    tokens cannot be split by version.
    """

    __slots__ = ("_gate", "admitted", "blocked", "key", "streaming", "version", "version_unknown")

    def __init__(self, gate: WeightUpdateGate, key: str | None, *, streaming: bool) -> None:
        self._gate = gate
        self.key = key
        self.streaming = streaming
        self.version = gate.version
        self.admitted = False  # let in, once
        self.version_unknown = False
        # Set while the client does not take what is sent: tokens may wait unread behind it.
        self.blocked = False

    def arrival_version(self) -> int:
        """The version of tokens that arrive now."""
        return self._gate.note_arrival()

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


class WeightUpdateGate:
    def __init__(
        self,
        version: int = 0,
        *,
        held: bool = False,
        max_waiting: int = 4096,
        max_wait_s: float = 900.0,
    ) -> None:
        """`held`: nobody enters before a first `release`. At most `max_waiting` calls wait, each
        at most `max_wait_s` seconds."""
        self.version = version
        self._arrivals = 0
        self._last_arrival = -SETTLE_S  # by the monotonic clock
        self._held = held
        self._held_since = time.monotonic()
        self._held_s = 0.0  # by holds that ended
        self.pushes = held  # whether weights are pushed to the engine
        self._inside: set[Admission] = set()
        self._waiting = FairQueue(max_waiting)
        self._max_wait_s = max_wait_s
        self._whole = 0  # calls inside whose body comes in one piece
        self._drained = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def admission(self, key: str | None = None, *, streaming: bool) -> Admission:
        """`key`: the rollout, or None for a call without a name; rollouts take turns."""
        return Admission(self, key, streaming=streaming)

    @property
    def held(self) -> bool:
        return self._held

    def held_s(self) -> float:
        """Seconds in which calls were held, since the start."""
        return self._held_s + (time.monotonic() - self._held_since if self._held else 0.0)

    @property
    def ended_holds_s(self) -> float:
        """Seconds of the holds that have ended."""
        return self._held_s

    def state(self) -> dict[str, int | bool]:
        return {
            "version": self.version,
            "held": self._held,
            "in_flight": len(self._inside),
            "waiting": len(self._waiting),
        }

    async def enter(self, admission: Admission) -> None:
        """Raises Unavailable when too many calls wait already, or this one has for too long."""
        deadline = asyncio.get_running_loop().time() + self._max_wait_s if self._held else 0.0
        while self._held:
            await self._wait(admission, deadline - asyncio.get_running_loop().time())
        admission.version = self.version
        admission.admitted = True
        self._inside.add(admission)
        if not admission.streaming:
            self._whole += 1

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
        if not admission.streaming:
            self._whole -= 1
            if self._whole == 0:
                self._drained.set()

    async def hold(self, *, ttl_s: float, drain_s: float) -> int:
        """New calls wait. Returns the number of calls inside once those that come in one piece
        have finished, or `drain_s` seconds later. A hold opens by itself after `ttl_s`."""
        if not self._held:
            self._held_since = time.monotonic()
        self._held = self.pushes = True
        self._restart_timer(ttl_s)
        if self._whole:
            self._drained.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), drain_s)
        return len(self._inside)

    async def set_version(self, version: int) -> None:
        """Tokens that arrive from now on are `version`. To be called while the engine is paused."""
        await self._settle()
        for admission in self._inside:
            admission.version_unknown = (
                admission.version_unknown or admission.blocked or not admission.streaming
            )
        self.version = version

    def release(self) -> None:
        """Waiting calls go on; rollouts take turns, each with its calls in order."""
        self._held_s, self._held = self.held_s(), False
        self._drained.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.release()

    def note_arrival(self) -> int:
        """Tokens arrived; the version that they are of."""
        self._arrivals += 1
        self._last_arrival = time.monotonic()
        return self.version

    async def _settle(self) -> None:
        limit = time.monotonic() + SETTLE_LIMIT_S
        quiet = 0
        while (now := time.monotonic()) < limit:
            if quiet >= SETTLE_TICKS and now - self._last_arrival >= SETTLE_S:
                return
            seen = self._arrivals
            await asyncio.sleep(SETTLE_TICK_S)
            quiet = quiet + 1 if self._arrivals == seen else 0

    def _restart_timer(self, ttl_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(ttl_s, self._expire, ttl_s)

    def _expire(self, ttl_s: float) -> None:
        log.error(
            "a weight push held calls for %g s without a release; %d waiting calls go on",
            ttl_s,
            len(self._waiting),
        )
        self.release()
