"""Two proxies on one PostgreSQL store behind HAProxy, as `deploy/haproxy.cfg` has it: agents know
one address, weights are pushed to both, and what is killed costs time alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from support.deploy.haproxy import haproxy
from support.engines.mock_engine import MODEL, Answer, MockEngine
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.proxy_process import ProxyProcess
from support.proxy.servers import CONTROL_KEY, EngineServer, eventually, serving
from support.store import postgres_server
from support.trainer.sleeping_engine import SleepingEngine
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad_trainer.inference.engine_watch import EngineWatch
from tracegrad_trainer.inference.weight_push import WeightPusher

AGENTS, TURNS = 6, 12


@dataclass(frozen=True)
class Fleet:
    """`url`: what agents call."""

    url: str
    proxies: list[ProxyProcess]
    engine: MockEngine
    store: Store

    def client(self, rollout_id: str, *, retries: int = 0) -> openai.OpenAI:
        key = f"tg-{rollout_id}"
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=retries, timeout=120
        )

    def calls(self) -> list[int]:
        """That each proxy has answered."""
        return [_calls(proxy.url) for proxy in self.proxies]


def _calls(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("tracegrad_proxy_calls_total{")]
    return sum(int(float(line.split()[-1])) for line in found)


@pytest.fixture(scope="module")
def server() -> Iterator[postgres_server.Server]:
    with postgres_server.running() as server:
        yield server


@pytest.fixture
def fleet(server: postgres_server.Server, tmp_path: Path) -> Iterator[Fleet]:
    """They hold their calls until they are told a version."""
    engines, engine = EngineServer(), PromptDrivenEngine()
    engines.engine = engine
    database = server.new_database()
    with serving(engines) as upstream, Store.open(database) as store:
        settings = {"held": "true", "control_key": CONTROL_KEY}
        proxies = [
            ProxyProcess(upstream, database, tmp_path / f"proxy{number}.log", **settings)
            for number in (0, 1)
        ]
        try:
            for proxy in proxies:
                proxy.start()
            with haproxy([proxy.url for proxy in proxies], tmp_path / "haproxy.log") as url:
                yield Fleet(url, proxies, engine, store)
        finally:
            for proxy in proxies:
                proxy.close()


@pytest.fixture
def pusher(fleet: Fleet, tmp_path: Path) -> Iterator[WeightPusher]:
    """With vLLM's other routes on a port of their own; version 1 is served."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"w": torch.tensor([0.0])}, folder / "model.safetensors")
    engine = SleepingEngine()
    urls = [proxy.url for proxy in fleet.proxies]
    with WeightPusher(
        engine.url, urls, proxy_key=CONTROL_KEY, version=-1, checkpoint=folder, drain_s=30
    ) as pusher:
        pusher.push(1, weights(1))
        with EngineWatch(pusher, every_s=0.2):
            yield pusher
    engine.close()


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.tensor([float(version)]))]


def test_a_rollout_stays_with_one_proxy_and_both_have_some(
    fleet: Fleet, pusher: WeightPusher
) -> None:
    before = fleet.calls()
    for _ in range(8):
        ask(fleet.client("always-here"), [{"role": "user", "content": "hello"}])
    rises = [now - then for now, then in zip(fleet.calls(), before, strict=True)]
    assert sorted(rises) == [0, 8]
    for number in range(16):
        ask(fleet.client(f"some-{number}"), [{"role": "user", "content": "hello"}])
    rises = [now - then for now, then in zip(fleet.calls(), before, strict=True)]
    assert sum(rises) == 24
    assert min(rises) > 0


def test_a_stream_comes_as_it_is_sampled(fleet: Fleet, pusher: WeightPusher) -> None:
    fleet.engine.replies.append(Answer("one two three four five six seven"))
    rest = fleet.engine.wait_before(3)
    with fleet.client("streams").chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "count"}], stream=True
    ) as stream:
        said = ""
        for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            if said:
                rest.set()  # without this the rest never comes
    assert said == "one two three four five six seven"


def test_calls_wait_at_both_while_weights_change_and_have_the_version_of_their_tokens(
    fleet: Fleet, pusher: WeightPusher
) -> None:
    """And while a proxy is killed, and started again: a call that begins after a push is never of
    a version before it, and every answer that an agent got is on its rollout's one path."""
    played = [Agent(fleet, pusher, f"agent-{number}") for number in range(AGENTS)]
    threads = [threading.Thread(target=agent.play) for agent in played]
    for thread in threads:
        thread.start()
    version = 1
    for proxy in (*fleet.proxies, *fleet.proxies):
        eventually(lambda: any(agent.turns for agent in played))
        proxy.kill()
        version += 1
        pusher.push(version, weights(version))
        time.sleep(0.3)
        proxy.start()
        version += 1
        pusher.push(version, weights(version))
    for agent in played:
        agent.may_end.set()
    for thread in threads:
        thread.join(300)
    assert [error for agent in played for error in agent.errors] == []
    for agent in played:
        agent.check(fleet.store.rollout_turns(agent.rollout_id))
    assert pusher.version == version == 9


class Agent:
    """Appends what it is answered, and asks on, with its client's own retries."""

    def __init__(self, fleet: Fleet, pusher: WeightPusher, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.client = fleet.client(rollout_id, retries=4)
        self.pusher = pusher
        self.may_end = threading.Event()
        self.turns: list[tuple[str, int]] = []  # answer, and what was served when it was asked for
        self.errors: list[Exception] = []

    def play(self) -> None:
        messages: list[dict[str, str]] = []
        while len(self.turns) < TURNS or not self.may_end.is_set():
            messages.append({"role": "user", "content": f"{self.rollout_id}/{len(self.turns)}"})
            served = self.pusher.version
            try:
                said = ask(self.client, messages)
            except Exception as error:
                self.errors.append(error)
                return
            self.turns.append((said, served))
            messages.append({"role": "assistant", "content": said})
            time.sleep(0.05)

    def check(self, recorded: list[Turn]) -> None:
        before: set[str | None] = {None}
        for said, served in self.turns:
            # More than one: recorded when its proxy was killed, and asked for again.
            them = [turn for turn in recorded if turn.parent_id in before and text(turn) == said]
            before = {turn.turn_id for turn in them}
            versions = [version for turn in them for version, _ in turn.policy_versions]
            assert max(versions) >= served, (said, versions)


def ask(client: openai.OpenAI, messages: list[dict[str, str]]) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def text(turn: Turn) -> str:
    assert turn.response is not None
    return str(turn.response["choices"][0]["message"]["content"])
