"""The worker as a process: it scores what comes, stops when asked, and may be killed anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.proxy.servers import eventually
from support.store.events import rollout_events
from support.trainer import scorers
from tracegrad.store import Store
from tracegrad.store.types import COMPOSED_SOURCE, SCORER_SOURCE
from tracegrad_trainer.launch.run_state import is_at_work
from tracegrad_trainer.rewards.worker import sign_of_life

WITHIN_S = 90.0
StartWorker = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, url: str) -> Iterator[StartWorker]:
    """Starts a worker on the store with these `rewards`."""
    started: list[subprocess.Popen[bytes]] = []

    def worker(**rewards: Any) -> subprocess.Popen[bytes]:
        resolved = {
            "state_dir": str(tmp_path),
            "seed": 0,
            "proxy": {"store": url},
            "data": {"tags": {}, "incomplete_after_s": 60.0},
            "batches": {"group_size": 2},
            "rewards": {"retries": 0, **rewards},
        }
        file = tmp_path / "settings.json"
        file.write_text(json.dumps(resolved))
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3]),
            scorers.CALLS: str(tmp_path / "calls"),
            "SCORER_GO": str(tmp_path / "go"),
        }
        command = [sys.executable, "-m", "tracegrad_trainer.rewards.worker", str(file)]
        with (tmp_path / "log").open("ab") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return started[-1]

    (tmp_path / "calls").touch()
    yield worker
    for process in started:
        process.kill()
        process.wait()


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def reward_of(store: Store, name: str) -> float | None:
    return store.rollout(name).summary.reward


def test_it_scores_what_ends_and_stops_when_asked(
    store: Store, tmp_path: Path, start: StartWorker
) -> None:
    worker = start(functions=["support.trainer.scorers:resolved"])
    eventually(lambda: is_at_work(tmp_path, "scorers", worker.pid), WITHIN_S)
    assert is_at_work(tmp_path, "scorers"), "whatever its process is"
    assert not is_at_work(tmp_path, "scorers", worker.pid + 1)
    assert not is_at_work(tmp_path, "scorers", worker.pid, clock=lambda: 1e12), "silent for long"
    assert not is_at_work(tmp_path, "evaluator")
    store.append(rollout_events("r1", reward=None))
    eventually(lambda: reward_of(store, "r1") == 1.0, WITHIN_S)
    store.append(rollout_events("r2", reward=None))
    eventually(lambda: reward_of(store, "r2") == 0.0, WITHIN_S)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(WITHIN_S) == 0
    assert sign_of_life(tmp_path).exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_ends_in_the_middle_loses_nothing_and_scores_nothing_twice(
    store: Store, tmp_path: Path, start: StartWorker, number: signal.Signals
) -> None:
    names = ["r1", "r2", "r3"]
    for name in names:
        store.append(rollout_events(name, reward=None))
    slow = {"functions": ["support.trainer.scorers:waits_for_a_file"], "concurrency": 3}
    worker = start(**slow)
    eventually(lambda: len(calls(tmp_path)) == 3, WITHIN_S)
    children = _children(worker.pid)
    assert len(children) >= 3
    worker.send_signal(number)
    worker.wait(WITHIN_S)
    eventually(lambda: not any(map(_is_alive, children)), WITHIN_S)
    assert [store.rollout(name).scorings for name in names] == [[], [], []]
    (tmp_path / "go").touch()
    start(**slow)
    eventually(lambda: [reward_of(store, name) for name in names] == [1.0] * 3, WITHIN_S)
    for name in names:
        sources = Counter(each.source for each in store.rewards(name))
        assert sources == {SCORER_SOURCE: 1, COMPOSED_SOURCE: 1}
        assert len(store.rollout(name).scorings) == 1


@pytest.mark.databases("sqlite")
def test_a_function_that_is_not_there_is_the_last_line_of_the_log(
    store: Store, tmp_path: Path, start: StartWorker
) -> None:
    assert start(functions=["no_such:thing"]).wait(WITHIN_S) == 1
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("FunctionUnusable: function 'no_such:thing' cannot be imported")


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
