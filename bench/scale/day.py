"""A day in virtual time: what is due goes through the proxy, then the clock goes on.

Events are in a heap, by their virtual second. All that is due in one second is sent at once, so
that the store's writer has as much to put into one transaction as the second brings. Where only
every k-th agent is simulated, k seconds are taken together (15 at most): as many calls at once as
all agents make in one. Nothing waits for real time, so a day takes as long as its calls need.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import count

from bench.scale.board import Cell
from bench.scale.client import CallFailed, Client
from bench.scale.rig import Rig, Used
from bench.scale.session import Scene, Session, Texts
from bench.scale.workload import HOUR_S, EngineRates, Workload, rollouts_of

# 2026-01-05 00:00 UTC: a Monday.
EPOCH = 1_767_571_200.0
# Seconds of a step of the clock; each divides an hour. A call comes some ten seconds after the one
# before: longer steps would make rollouts longer than they are.
_TICKS_S = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15)

OnCall = Callable[[Session, float], None]


@dataclass(slots=True)
class Done:
    """What agents did. `engine_s`: seconds of an engine by its rates; `agent_bytes`: of bodies
    between agents and proxy."""

    calls: float = 0.0
    posts: float = 0.0  # of events
    rollouts: float = 0.0
    prompt_tokens: float = 0.0
    new_tokens: float = 0.0
    sampled_tokens: float = 0.0
    engine_s: float = 0.0
    agent_bytes: float = 0.0
    wall_s: float = 0.0

    def since(self, earlier: Done) -> Done:
        return Done(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Done)))


@dataclass(frozen=True, slots=True)
class Span:
    """Some virtual time: what was done and used in it. `memory`: the proxy's resident bytes at its
    end."""

    begin: float
    end: float
    done: Done
    used: Used
    memory: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one agent in `every`. `failed`: calls and posts, by what came instead of an answer."""

    every: int
    tick_s: int
    hours: tuple[Span, ...]
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def whole(self) -> Span:
        """All of its hours."""
        first, last = self.hours[0], self.hours[-1]
        return Span(
            first.begin,
            last.end,
            Done(*(sum(getattr(h.done, f.name) for h in self.hours) for f in fields(Done))),
            Used(*(sum(getattr(h.used, f.name) for h in self.hours) for f in fields(Used))),
            last.memory,
        )

    @property
    def peak(self) -> Span:
        """The hour with the most calls."""
        return max(self.hours, key=lambda hour: hour.done.calls)


@dataclass(frozen=True, slots=True)
class Plan:
    """`every`: of so many agents one is simulated. `together`: what is due at once is sent at
    once; else one after another, and each call has its own commit. `epoch`: when the day begins,
    seconds since 1970. `label`: no other day of the proxy has it."""

    workload: Workload
    engine: EngineRates
    label: str
    every: int = 1
    together: bool = True
    epoch: float = EPOCH
    seed: int = 0

    @property
    def tick_s(self) -> int:
        return max(tick for tick in _TICKS_S if tick <= self.every) if self.together else 1


async def simulate(plan: Plan, rig: Rig, texts: Texts, on_call: OnCall | None = None) -> Outcome:
    """`on_call` is told of each call, before it is made, with the virtual second."""
    async with Client(rig.url) as client:
        day = _Day(plan, rig, client, texts, on_call)
        await day.run()
        return Outcome(plan.every, plan.tick_s, tuple(day.hours), day.failed)


class _Day:
    def __init__(
        self, plan: Plan, rig: Rig, client: Client, texts: Texts, on_call: OnCall | None
    ) -> None:
        self._plan, self._rig, self._client, self._on_call = plan, rig, client, on_call
        self.hours: list[Span] = []
        self.failed: Counter[str] = Counter()
        self._done = Done()
        self._began = time.perf_counter()
        self._order = count()  # of what is due at the same time
        workload = plan.workload
        scene = Scene(plan.label, client, texts, plan.engine, workload.instructions)
        self._due: list[tuple[float, int, Session]] = [
            (rollout.begins, next(self._order), Session(rollout, scene))
            for agent in range(0, workload.agents, plan.every)
            for rollout in rollouts_of(workload, agent, plan.seed)
        ]
        heapq.heapify(self._due)

    async def run(self) -> None:
        seconds, tick_s = self._plan.workload.seconds, self._plan.tick_s
        hour, before = 0.0, (self._counted(), self._rig.used())
        while hour < seconds:
            end = min(hour + HOUR_S, seconds)
            await self._until(end, tick_s)
            now = self._counted(), self._rig.used()
            done, used = now[0].since(before[0]), now[1].since(before[1])
            self.hours.append(Span(hour, end, done, used, self._rig.memory()))
            hour, before = end, now

    async def _until(self, end: float, tick_s: int) -> None:
        """All that is due before `end`. Ticks begin at multiples of `tick_s`."""
        while self._due and self._due[0][0] < end:
            tick = self._due[0][0] // tick_s * tick_s
            upto = tick + tick_s
            batch: list[Session] = []
            while self._due and self._due[0][0] < upto:
                batch.append(heapq.heappop(self._due)[2])
            self._rig.board[Cell.NOW] = self._plan.epoch + tick
            if self._plan.together:
                followings = await asyncio.gather(*(self._step(each, tick) for each in batch))
            else:
                followings = [await self._step(each, tick) for each in batch]
            for session, following in zip(batch, followings, strict=True):
                if following is not None:
                    # Nothing is due in a tick that is over.
                    due = max(following, upto)
                    heapq.heappush(self._due, (due, next(self._order), session))

    async def _step(self, session: Session, tick: float) -> float | None:
        calls = session.calls_next
        if calls and self._on_call is not None:
            self._on_call(session, self._plan.epoch + tick)
        try:
            following = await session.step(tick)
        except CallFailed as error:
            self.failed[str(error)[:80]] += 1
            return None
        if calls:
            self._note_call(session)
        return following

    def _note_call(self, session: Session) -> None:
        done = self._done
        done.rollouts += session.is_first_call
        done.prompt_tokens += session.prompt_tokens
        done.new_tokens += session.new_tokens
        done.sampled_tokens += session.sampled_tokens
        done.engine_s += session.engine_s

    def _counted(self) -> Done:
        client, done = self._client, self._done
        return Done(
            calls=client.calls,
            posts=client.posts,
            rollouts=done.rollouts,
            prompt_tokens=done.prompt_tokens,
            new_tokens=done.new_tokens,
            sampled_tokens=done.sampled_tokens,
            engine_s=done.engine_s,
            agent_bytes=client.sent + client.received,
            wall_s=time.perf_counter() - self._began,
        )
