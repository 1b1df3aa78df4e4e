"""The demo's task trained without end, with background traffic beside it, for a while."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sqlalchemy import select

from bench.kills.run import Calls, counted
from bench.pages import ROOT
from bench.soak.sampler import Sample, Sampler, samples_in
from bench.soak.traffic import STOP_S, Call, calls_in
from tracegrad.proxy.capture.call_index import turn_id_in_response
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad.store.models import Turns
from tracegrad.store.types import RewardPoint
from tracegrad_trainer.utils.network import find_free_port

EXAM_TASKS = 100
WORKERS = 2
SETTINGS: Mapping[str, object] = {
    # The demo's rate has learnt everything within a few minutes; and groups whose rewards are all
    # equal make no step there, so that who is always right would not be trained any more.
    "optim.lr": 1e-4,
    "batches.drop_equal_reward": "false",
    "proxy.workers": WORKERS,
    # A cache that still fills looks like a leak.
    "proxy.cache_mib": 4,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are seconds since the epoch. `began` to `ended`: traffic and training."""

    began: float
    ended: float
    samples: Sequence[Sample]
    calls: Sequence[Call]  # of the background
    gate_s: Mapping[str, float]  # of their turns, by answer: how long weights were pushed
    agents: Calls
    missing: int  # answers whose turns the store does not have
    rewards: Sequence[RewardPoint]  # of training
    before: float  # greedy success on held-out tasks
    after: float
    steps: Sequence[StepRecord]
    left: Sequence[str]  # processes that were still there in the end
    complaints: Sequence[str]  # lines of logs


def run(root: Path, minutes: float, rate: float, seed: int, say: Callable[[str], None]) -> Outcome:
    """`root`: a folder for the run. `rate`: of conversations in the background, a second."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    port = find_free_port()
    # Before the shop's agent is imported, which makes its client then.
    os.environ["TRACEGRAD_URL"] = url = f"http://127.0.0.1:{port}"
    shop, stages = import_module("examples.shop.run"), import_module("examples.shop.stage")
    screen = import_module("examples.shop.screen").Screen()
    state_dir = root / "state"
    plan = shop.Plan(port=port, root=ROOT / ".tracegrad" / "demo", state_dir=state_dir, seed=seed)
    model = shop.warm_up(plan, screen)
    calls, samples = root / "calls.jsonl", root / "samples.jsonl"
    with stages.served(port, model, state_dir, {**shop.SERVE, **SETTINGS}, lambda _: None) as stage:
        say(f"everything is up; samples and calls: {root}")
        with Sampler(stage.child.pid, state_dir, url, samples) as sampler:
            play = _play(
                shop, stage, lambda: background(url, calls, rate, seed), minutes, seed, say
            )
            played = asyncio.run(play)
    say("stopped")
    return _outcome(played, state_dir, calls, samples, sampler.left())


@contextmanager
def background(url: str, file: Path, rate: float, seed: int) -> Iterator[None]:
    """Background traffic in a process of its own; it ends when its calls have ended.

    RuntimeError: it did not end well.
    """
    command = [sys.executable, "-m", "bench.soak.traffic", url, str(file)]
    command += [f"--rate={rate}", f"--seed={seed}"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code: int | None = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
    if code != 0:
        raise RuntimeError(f"background traffic ended with {code}")


@dataclass(frozen=True, slots=True)
class _Played:
    began: float
    ended: float
    before: float
    after: float
    agents: Calls


async def _play(
    shop: Any, stage: Any, traffic: Any, minutes: float, seed: int, say: Callable[[str], None]
) -> _Played:
    drive, tasks = import_module("examples.shop.drive"), import_module("examples.shop.tasks")
    tracegrad = import_module("tracegrad")
    exam = tasks.exam("held_out", EXAM_TASKS)
    with counted() as agents:
        before = await drive.evaluate(exam, 0.0, "held_out")
        began = time.time()
        over = time.monotonic() + 60 * minutes

        def until_over() -> Iterator[Any]:
            for task in tasks.train_tasks(seed):
                if time.monotonic() > over:
                    return
                yield task

        async def permit() -> None:
            while time.monotonic() < over:
                stage.check()
                with suppress(TimeoutError):
                    await tracegrad.intake(shop.SAMPLES, timeout_s=1.0)
                    return

        said = time.monotonic()
        with traffic():
            async for group in drive.train(until_over(), samples=shop.SAMPLES, permit=permit):
                stage.check()
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    success = sum(group.successes) / len(group.successes)
                    say(f"step {stage.last_step}, success of the last group {success:.2f}")
            ended = time.time()
        await shop.settle(stage)
        after = await drive.evaluate(exam, 0.0, "held_out")
    tracegrad.flush()
    return _Played(began, ended, before.rate, after.rate, agents)


def _outcome(
    played: _Played, state_dir: Path, calls_file: Path, samples_file: Path, left: Sequence[str]
) -> Outcome:
    calls = calls_in(calls_file)
    answers = [call.answer_id for call in calls if call.answer_id is not None]
    with Store.open(f"sqlite:///{state_dir}/store.db", create=False) as store:
        stored = turns_of(store, [*answers, *played.agents.answered])
        return Outcome(
            began=played.began,
            ended=played.ended,
            samples=samples_in(samples_file),
            calls=calls,
            gate_s={answer: stored[answer] for answer in answers if answer in stored},
            agents=played.agents,
            missing=len({*answers, *played.agents.answered}) - len(stored),
            rewards=store.reward_curve({"split": "train"}),
            before=played.before,
            after=played.after,
            steps=Ledger(store).steps(),
            left=left,
            complaints=complaints(state_dir),
        )


def turns_of(store: Store, answers: Sequence[str]) -> dict[str, float]:
    """Those of `answers`, by their ids, whose turns are stored -> seconds that the turn waited for
    a push of weights."""
    with store.reading() as connection:
        rows = connection.execute(select(Turns.turn_id, Turns.timing)).tuples()
        timings: dict[str, Any] = {turn: timing or {} for turn, timing in rows}
    turns = {answer: turn_id_in_response(answer) for answer in answers}
    return {
        answer: float(timings[turn].get("gate", 0.0))
        for answer, turn in turns.items()
        if turn is not None and turn in timings
    }


_COMPLAINT = re.compile(r"\b(ERROR|CRITICAL)\b|^Traceback|\bnever awaited\b")
# vLLM says so of each request that it refuses, as it must some of the background's; and its server,
# as it stops, of the engine that stops with it.
_REFUSED = re.compile(r"\[(exception|validation)\.py:\d+\]")
_STOPPING = "[shutdown]"


def complaints(state_dir: Path) -> list[str]:
    """Lines of the run's logs that speak of errors."""
    found = []
    for log in sorted((state_dir / "logs").glob("*.log")):
        text = log.read_text(errors="replace")
        lines = (text.partition(_STOPPING)[0] if log.name == "vllm.log" else text).splitlines()
        found += [
            f"{log.name}: {line[:200]}"
            for line in lines
            if _COMPLAINT.search(line) and not _REFUSED.search(line)
        ]
    return found
