"""The teacher at work: its turns are recorded by the proxy, which asks it through LiteLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from examples.shop import drive, tasks
from examples.shop.rollouts import Score
from examples.shop.screen import Screen

from tracegrad import flush
from tracegrad_trainer.utils.subprocesses import ChildProcess, is_responding

from . import teacher

STARTED_S = 120.0  # LiteLLM is slow to import


@dataclass(frozen=True, slots=True)
class Recording:
    store: str  # its URL
    score: Score  # of the teacher on the training tasks that it was asked


@contextmanager
def proxy_to(upstream: str, port: int, folder: Path) -> Iterator[str]:
    """`tracegrad proxy` in front of the teacher; gives the URL of its store. Raises ChildError.

    The proxy turns LiteLLM's telemetry and its look-ups on the network off.
    """
    store = f"sqlite:///{folder}/store.db"
    command = [sys.executable, "-m", "tracegrad.cli", "proxy", "--upstream-kind", "litellm"]
    command += ["--upstream", upstream, "--store", store, "--port", str(port)]
    # A provider wants a key; this one reads none.
    key = {"TRACEGRAD_PROXY_UPSTREAM_API_KEY": "unused"}
    child = ChildProcess("tracegrad proxy", command, log=folder / "logs" / "proxy.log", env=key)
    folder.mkdir(parents=True, exist_ok=True)
    child.start()
    try:
        child.wait_until_ready(
            lambda: is_responding(f"http://127.0.0.1:{port}", "/healthz"), timeout_s=STARTED_S
        )
        yield store
    finally:
        child.stop()


async def record(port: int, folder: Path, seed: int, count: int, screen: Screen) -> Recording:
    """The agent answers `count` training tasks with the teacher as its model.

    It is the same agent, unchanged: it knows the proxy's address and a model's name.
    """
    with screen.phase("the teacher works, recorded through LiteLLM", count) as phase:
        with teacher.answering() as upstream, proxy_to(upstream, port, folder) as store:
            score = Score(0, 0)
            some = islice(tasks.train_tasks(seed), count)
            async for group in drive.train(some, samples=1, concurrency=8):
                score = Score(score.successes + int(sum(group.successes)), score.rollouts + 1)
                phase.update(score.rollouts, f"right {score.successes} of {score.rollouts}")
            flush()
        return Recording(store, score)
