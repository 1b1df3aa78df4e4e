"""The demo's task while its processes are killed: what agents saw, what the store has of it."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from tests.support.store import postgres_crash

from bench.kills.kept_serve import KeptServe
from bench.kills.killer import Kill, Killer
from bench.kills.streams import Streams, readers
from tracegrad.proxy.http.listener import listen
from tracegrad.store import Ledger, Store
from tracegrad.store.models import TurnLedger, Turns

READY_S = 300.0
EXAM_TASKS = 100
# The demo's rate has learnt everything after thirty steps, and groups of equal rewards make none.
LEARNING_RATE = 1e-4


@dataclass(slots=True)
class Calls:
    """As agents made them, with the client's own retries (two, as by default)."""

    answered: list[str] = field(default_factory=list)  # answers' ids
    seconds: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # by error


@dataclass(frozen=True, slots=True)
class Outcome:
    kills: Sequence[Kill]
    calls: Calls
    streams: Streams
    before: float  # greedy success
    after: float
    steps: int
    lost: int  # answers that an agent got, and the store does not have
    unfinished: Mapping[str, int]  # state -> turns, of those that no step has looked at
    numbers_right: bool  # steps are 1, 2, 3, ..., each turn trained or skipped once
    seconds: float

    @property
    def slowest_s(self) -> float:
        return max(self.calls.seconds, default=0.0)

    @property
    def median_s(self) -> float:
        return statistics.median(self.calls.seconds)


def run(root: Path, kills: int, seed: int, minutes: float, say: Any) -> Outcome:
    """Raises TimeoutError: something did not come up again."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with listen("127.0.0.1", 0, if_taken="") as listener:
        # Before the shop's agent is imported, which makes its client then.
        os.environ["TRACEGRAD_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return _run(listener, root, kills, seed, minutes, say)


def _run(
    listener: socket.socket, root: Path, kills: int, seed: int, minutes: float, say: Any
) -> Outcome:
    shop = import_module("examples.shop.run")
    screen = import_module("examples.shop.screen").Screen()
    state_dir = root / "run"
    plan = shop.Plan(port=0, root=root / "models", state_dir=state_dir, seed=seed)
    model = shop.warm_up(plan, screen)
    settings = dict(shop.SERVE) | {"optim.lr": LEARNING_RATE, "max_restarts": 1000}
    with postgres_crash.crashing() as database:
        url = database.server.new_database()
        settings["proxy.store"] = url
        with KeptServe(listener, model, state_dir, settings, database) as serve:
            _await(serve.is_serving)
            with Store.open(url, create=False) as store:
                killer = Killer(serve, lambda: _steps(store), kills, seed, minutes, say)
                return asyncio.run(_play(shop, serve, store, killer, seed))


async def _play(shop: Any, serve: KeptServe, store: Store, killer: Killer, seed: int) -> Outcome:
    drive, tasks = import_module("examples.shop.drive"), import_module("examples.shop.tasks")
    exam = tasks.exam("held_out", EXAM_TASKS)
    with counted() as calls:
        before = await drive.evaluate(exam, 0.0, "held_out")
        began = time.monotonic()
        killer.start()

        def until_done() -> Iterator[Any]:
            training = tasks.train_tasks(seed)
            while not killer.done:
                yield next(training)

        async def permit() -> None:
            while not killer.done:
                with suppress(TimeoutError):
                    await import_module("tracegrad").intake(shop.SAMPLES, timeout_s=1.0)
                    return

        async with readers() as streams:
            async for _ in drive.train(until_done(), samples=shop.SAMPLES, permit=permit):
                pass
        seconds = time.monotonic() - began
        await asyncio.to_thread(_await, lambda: serve.is_serving() and serve.doing() == "waiting")
        after = await drive.evaluate(exam, 0.0, "held_out")
    import_module("tracegrad").flush()
    steps = Ledger(store).steps()
    counts = store.turn_counts({"split": "train"})
    return Outcome(
        kills=killer.kills,
        calls=calls,
        streams=streams,
        before=before.rate,
        after=after.rate,
        steps=len(steps),
        lost=_lost(store, calls.answered),
        unfinished=counts.pending,
        numbers_right=[step.step for step in steps] == list(range(1, len(steps) + 1))
        and _trained(store) == sum(step.metrics["turns_trained"] for step in steps),
        seconds=seconds,
    )


@contextmanager
def counted() -> Iterator[Calls]:
    """What the shop's agents get from their client."""
    agent = import_module("examples.shop.agent")
    completions, calls = agent.client.chat.completions, Calls()
    create = completions.create

    async def counted(**asked: Any) -> Any:
        began = time.monotonic()
        try:
            answer = await create(**asked)
        except Exception as error:
            calls.failed[type(error).__name__] += 1
            raise
        calls.seconds.append(time.monotonic() - began)
        calls.answered.append(answer.id)
        return answer

    completions.create = counted
    try:
        yield calls
    finally:
        del completions.create


def _steps(store: Store) -> int:
    last = Ledger(store).last_step()
    return 0 if last is None else last.step


def _lost(store: Store, answers: Sequence[str]) -> int:
    with store.reading() as connection:
        known = set(connection.scalars(select(Turns.turn_id)))
    return sum(answer.removeprefix("chatcmpl-") not in known for answer in answers)


def _trained(store: Store) -> int:
    with store.reading() as connection:
        return connection.scalar(select(func.count(TurnLedger.step))) or 0


def _await(what: Any) -> None:
    deadline = time.monotonic() + READY_S
    for _ in count():
        if what():
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"trainer serve is not ready after {READY_S:.0f} s")
        time.sleep(0.1)
