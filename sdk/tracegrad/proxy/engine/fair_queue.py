"""Calls that wait for a server: bounded in number, and fair between rollouts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class QueueFull(Exception):
    """There is no room for this call, or its room went to one of a rollout with fewer."""


class FairQueue:
    """First come first served within a rollout; rollouts take turns.

    Calls without a name (key None) share one place among the rollouts: a client must not get
    ahead by saying nothing.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._lanes: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, key: str | None, seconds: float) -> None:
        """Until `release`. Raises QueueFull, or TimeoutError after `seconds`."""
        self._make_room(key)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(key, deque()).append(place)
        self._count += 1
        try:
            async with asyncio.timeout(seconds):
                await place
        finally:
            if place.cancelled():
                self._drop_out(key, place)

    def release(self) -> None:
        """All go on: first the first call of every rollout, then the second of every one, ..."""
        while self._lanes:
            key, lane = self._lanes.popitem(last=False)
            self._leave(lane.popleft(), None)
            if lane:
                self._lanes[key] = lane

    @property
    def first(self) -> str | None:
        """The rollout whose turn it is; None: nobody with a name waits."""
        return next(iter(self._lanes), None)

    def holds(self, key: str | None) -> bool:
        """Whether a call of the rollout waits."""
        return key in self._lanes

    def release_key(self, key: str | None) -> None:
        """All calls of one rollout go on, in order."""
        for place in self._lanes.pop(key, ()):
            self._leave(place, None)

    def _make_room(self, key: str | None) -> None:
        if self._count < self._longest:
            return
        own = len(self._lanes.get(key, ()))
        greedy = max(self._lanes, key=lambda other: len(self._lanes[other]), default=key)
        if greedy == key or len(self._lanes[greedy]) <= own + 1:
            raise QueueFull
        # The newest call of the rollout with the most: its older ones keep their places.
        self._leave(self._lanes[greedy].pop(), QueueFull())

    def _leave(self, place: asyncio.Future[None], reason: QueueFull | None) -> None:
        self._count -= 1
        if place.done():  # cancelled in this very turn of the loop
            return
        if reason is None:
            place.set_result(None)
        else:
            place.set_exception(reason)

    def _drop_out(self, key: str | None, place: asyncio.Future[None]) -> None:
        lane = self._lanes.get(key)
        if lane is None or place not in lane:
            return
        lane.remove(place)
        self._count -= 1
        if not lane:
            del self._lanes[key]
