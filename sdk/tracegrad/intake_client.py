"""Back-pressure for drivers: when rollouts may be opened (`/api/intake` of the proxy).

A driver is what sends tasks to an agent in order to train it. One that asks before it opens
rollouts is never further ahead of training than the trainer's settings say. An agent that serves
people asks nobody, and waits for nobody.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass

from tracegrad.context import proxy_url
from tracegrad.protocol import INTAKE_PATH
from tracegrad.transport import ProxyUnreachable, get_json, post_json

_log = logging.getLogger("tracegrad")

_UNREACHABLE_RETRY_S = 1.0

# Ids of rollouts that may be opened here, and in tasks and threads that are started from here.
_places: ContextVar[deque[str] | None] = ContextVar("tracegrad_places", default=None)


@dataclass(frozen=True, slots=True)
class Intake:
    """What may be opened now.

    Attributes:
        rollouts: so many; the attempts of one group, where no number was asked for.
        waited_s: how long it was waited for, in seconds.
        paced: whether a trainer bounds what is opened; if not, nothing was waited for.
        version: the policy version that the trainer serves; None: it said none.
        rollout_ids: places, one for each. `rollout()` and `@trace` take them by themselves; a
            driver that names its rollouts otherwise opens them under these ids within a minute.
    """

    rollouts: int
    waited_s: float
    paced: bool
    version: int | None
    rollout_ids: tuple[str, ...]


def wait_for_intake(
    rollouts: int | None = None, *, timeout_s: float | None = None, url: str | None = None
) -> Intake:
    """Wait until rollouts may be opened; for drivers, before they open some.

        while tasks:
            attempts = tracegrad.wait_for_intake().rollouts
            run_group(tasks.pop(), attempts)

    The trainer's settings say how many may be under way (data.in_flight, data.synchronous,
    batches.stale = "wait"); without any, or without a trainer, it returns at once. The rollouts
    that are opened next, here or in tasks and threads that are started from here, take the places.

    Args:
        rollouts: that are opened together; None: the attempts of one group, as many as the trainer
            asks for (batches.group_size + data.over_sample), 1 without a trainer.
        timeout_s: the longest wait; None: however long it takes, also for a proxy that is away.
        url: the proxy; default TRACEGRAD_URL.

    Raises:
        TimeoutError: there was no room for `timeout_s`; says why.
        ProxyRefused: `rollouts` is more than can ever be under way, or the key is none.
        ValueError: TRACEGRAD_URL or TRACEGRAD_API_KEY cannot be used.
    """
    asking = _Asking(rollouts, timeout_s, url)
    while (found := asking.ask()) is None:
        time.sleep(asking.pause_s)
    return _placed(found)


async def intake(
    rollouts: int | None = None, *, timeout_s: float | None = None, url: str | None = None
) -> Intake:
    """`wait_for_intake` for asyncio: other tasks go on meanwhile."""
    import asyncio  # of agents' processes not all have it

    asking = _Asking(rollouts, timeout_s, url)
    while (found := await asyncio.to_thread(asking.ask)) is None:
        pause_s = asking.pause_s
        await asyncio.sleep(pause_s)
    return _placed(found)


@dataclass(frozen=True, slots=True)
class IntakeView:
    """What the proxy says of the trainer. `attempts`: of a group; None: no trainer says. `version`:
    the policy version that it serves; None: it said none. `reason`: why nothing may be opened now;
    empty: something may."""

    paced: bool
    attempts: int | None
    version: int | None
    reason: str = ""


def read_intake(url: str | None = None) -> IntakeView:
    """Takes no place. Raises ProxyUnreachable, ProxyRefused, and as `wait_for_intake`."""
    answer = json.loads(get_json(proxy_url(url), INTAKE_PATH))
    return IntakeView(answer["paced"], answer["attempts"], answer["version"], answer["reason"])


def use_place(rollout_id: str) -> None:
    """The rollout that is opened next here, or in a task that is started from here, takes it."""
    _places.set(deque([rollout_id]))


def take_place() -> str | None:
    """The id of a rollout that may be opened here; None: nobody asked for one."""
    places = _places.get()
    try:
        return places.popleft() if places else None
    except IndexError:  # another thread had the last one
        return None


def _placed(found: Intake) -> Intake:
    _places.set(deque(found.rollout_ids))
    return found


class _Asking:
    """One wait. `pause_s`: until the next ask, after one that had no room."""

    def __init__(self, rollouts: int | None, timeout_s: float | None, url: str | None) -> None:
        self._rollouts = rollouts
        self._timeout_s = timeout_s
        self._url = proxy_url(url)
        self._began = time.monotonic()
        self._warned = False
        self.pause_s = 0.0

    def ask(self) -> Intake | None:
        """None: not yet. Raises as `wait_for_intake`."""
        waited_s = time.monotonic() - self._began
        body = {"waited_s": waited_s}
        if self._rollouts is not None:
            body["rollouts"] = self._rollouts
        try:
            answer = json.loads(post_json(self._url, INTAKE_PATH, json.dumps(body).encode(), {}))
        except ProxyUnreachable as error:
            self._warn(error)
            self._wait(str(error), _UNREACHABLE_RETRY_S, waited_s)
            return None
        ids = tuple(answer["rollout_ids"])
        if not ids:
            self._wait(answer["reason"], answer["retry_after_s"], waited_s)
            return None
        return Intake(len(ids), waited_s, answer["paced"], answer["version"], ids)

    def _wait(self, reason: str, seconds: float, waited_s: float) -> None:
        if self._timeout_s is not None and waited_s >= self._timeout_s:
            raise TimeoutError(f"no rollout may be opened after {waited_s:.1f} s: {reason}")
        left = seconds if self._timeout_s is None else self._timeout_s - waited_s
        self.pause_s = min(seconds, left)

    def _warn(self, error: ProxyUnreachable) -> None:
        if not self._warned:
            _log.warning("waiting for the tracegrad proxy at %s: %s", self._url, error)
        self._warned = True
