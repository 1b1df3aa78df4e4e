"""The worker as a process: live prompts are sampled again through the proxy, as fast as a trainer
wants rollouts, until it is asked to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from support.engines.mock_engine import MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, eventually, serving
from support.store.intake_requests import intake_request
from tracegrad.events import Outcome
from tracegrad.store import RolloutSummary, Store
from tracegrad.store.ledger.intake import Intake
from tracegrad_trainer.config.resample import RESAMPLE_OF, RESAMPLED
from tracegrad_trainer.launch.run_state import is_at_work, read_state

WITHIN_S = 90.0
OURS = {RESAMPLED: "true"}
StartWorker = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyWithEngine]:
    Store.open(f"sqlite:///{tmp_path}/store.db").close()
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), tmp_path / "store.db") as found,
    ):
        yield found
        found.close_clients()


@pytest.fixture
def start(tmp_path: Path, proxy: ProxyWithEngine) -> Iterator[StartWorker]:
    started: list[subprocess.Popen[bytes]] = []

    def worker(agents: Sequence[str] = (), **changes: Any) -> subprocess.Popen[bytes]:
        resolved = {
            "state_dir": str(tmp_path),
            "proxy": {"store": f"sqlite:///{tmp_path}/store.db"},
            "promotion": {"gate": "none", "tags": {}},
            "resample": {"prompts": "live", **changes},
            "batches": {"agents": agents, "models": []},
        }
        file = tmp_path / "settings.json"
        file.write_text(json.dumps(resolved))
        env = {**os.environ, "TRACEGRAD_URL": proxy.url, "TRACEGRAD_API_KEY": ""}
        env |= {"HTTP_PROXY": "http://127.0.0.1:9"}  # nobody listens there, and nobody is to ask it
        command = [sys.executable, "-m", "tracegrad_trainer.resampling.worker", str(file)]
        with (tmp_path / "log").open("ab") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return started[-1]

    yield worker
    for process in started:
        process.kill()
        process.wait()


def want(proxy: ProxyWithEngine, *, groups: int) -> None:
    """A trainer that has room for so many groups of three, and trains none."""
    limits = {"groups": 1, "group_size": 3, "attempts": 3, "in_flight": 3 * groups}
    Intake(proxy.store).request(intake_request(tags=OURS, **limits))


def ask(proxy: ProxyWithEngine, rollout_id: str, text: str, **headers: str) -> None:
    """A live call."""
    key, url = f"tg-{rollout_id}", f"{proxy.url}/v1"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, default_headers=headers) as client:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0.2
        )


def resampled(proxy: ProxyWithEngine) -> dict[str, list[RolloutSummary]]:
    """By the rollout whose prompt it was."""
    found: dict[str, list[RolloutSummary]] = {}
    for row in proxy.store.rollouts(limit=None):
        if row.tags.get(RESAMPLED):
            found.setdefault(row.tags[RESAMPLE_OF], []).append(row)
    return found


def test_a_live_prompt_becomes_a_group(
    proxy: ProxyWithEngine, start: StartWorker, tmp_path: Path
) -> None:
    want(proxy, groups=1)
    ask(proxy, "live", "where is 42?", **{"x-tracegrad-agent": "gr%C3%BCn"})
    worker = start()

    def done() -> bool:
        rows = resampled(proxy).get("live", [])
        return len(rows) == 3 and all(row.outcome is not None for row in rows)

    eventually(done, WITHIN_S)
    rows = resampled(proxy)["live"]
    assert {row.task_id for row in rows} == {"resample_of:live"}
    assert {row.outcome for row in rows} == {Outcome.COMPLETED}
    for row in rows:
        [turn] = proxy.turns(row.rollout_id)
        assert turn.request is not None
        assert turn.request["messages"] == [{"role": "user", "content": "where is 42?"}]
        assert turn.untrainable is None, "the live call was sampled at another temperature"
        assert turn.agent_name == "grün"
    eventually(lambda: is_at_work(tmp_path, "resampling", worker.pid), WITHIN_S)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(WITHIN_S) == 0
    state = read_state(tmp_path, "resampling")
    assert state is not None
    assert (state["stage"], state["prompts"], state["rollouts"]) == ("stopped", 1, 3)


def test_no_faster_than_a_trainer_wants(proxy: ProxyWithEngine, start: StartWorker) -> None:
    want(proxy, groups=1)
    ask(proxy, "first", "one")
    start(concurrency=3)
    eventually(lambda: len(resampled(proxy).get("first", [])) == 3, WITHIN_S)
    ask(proxy, "second", "two")
    want(proxy, groups=2)
    ask(proxy, "third", "three")
    eventually(lambda: len(resampled(proxy)) == 2, WITHIN_S)
    want(proxy, groups=3)
    eventually(lambda: len(resampled(proxy)) == 3, WITHIN_S)
    assert {name: len(rows) for name, rows in resampled(proxy).items()} == {
        "first": 3, "second": 3, "third": 3,
    }  # fmt: skip


def test_without_a_trainer_nothing_is_opened(
    proxy: ProxyWithEngine, start: StartWorker, tmp_path: Path
) -> None:
    """It alone knows how large a group is."""
    ask(proxy, "live", "one")
    worker = start()
    eventually(lambda: is_at_work(tmp_path, "resampling", worker.pid), WITHIN_S)
    want(proxy, groups=1)
    eventually(lambda: len(resampled(proxy).get("live", [])) == 3, WITHIN_S)
    assert len({row.task_id for row in resampled(proxy)["live"]}) == 1


def test_only_prompts_of_agents_that_are_trained_and_by_their_names(
    proxy: ProxyWithEngine, start: StartWorker, tmp_path: Path
) -> None:
    """As the ledger's rollouts have them: the new ones have no spans, and an agent of their own."""
    want(proxy, groups=2)
    ask(proxy, "reviewed", "one", **{"x-tracegrad-agent": "reviewer"})
    ask(proxy, "coded", "two", **{"x-tracegrad-agent": "coder"})
    start(agents=["coder"])
    eventually(lambda: len(resampled(proxy).get("coded", [])) == 3, WITHIN_S)

    def counted() -> bool:
        state = read_state(tmp_path, "resampling") or {}
        return state.get("unusable") == {"turn_not_selected": 1}

    eventually(counted, WITHIN_S)
    assert resampled(proxy).keys() == {"coded"}
    names = [row.rollout_id for row in resampled(proxy)["coded"]]
    assert {scope.agent for scope in proxy.store.turn_scopes(names).values()} == {"coder"}


def test_failed_calls_are_counted_and_the_next_prompt_comes(
    proxy: ProxyWithEngine, start: StartWorker, tmp_path: Path
) -> None:
    want(proxy, groups=4)
    ask(proxy, "refused", "one")
    proxy.engine.failure = (400, {"error": {"message": "too long"}}, {})
    start()
    eventually(lambda: (read_state(tmp_path, "resampling") or {}).get("failed") == 3, WITHIN_S)
    eventually(
        lambda: {row.outcome for row in resampled(proxy)["refused"]} == {Outcome.AGENT_ERROR},
        WITHIN_S,
    )
    assert (
        "3 of 3 rollouts of the first prompt of refused failed: 400"
        in (tmp_path / "log").read_text()
    )
    proxy.engine.failure = None
    ask(proxy, "answered", "two")
    eventually(lambda: len(resampled(proxy).get("answered", [])) == 3, WITHIN_S)
