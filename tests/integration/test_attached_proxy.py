"""`trainer serve` beside a vLLM and a proxy that others started: it pushes through the proxy's
gate, its workers have the proxy's key, and what others started outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.engines.vllm_server import tiny_settings
from support.proxy.servers import eventually
from support.trainer.char_model import save_char_model
from support.trainer.trainer_serve import TrainerServe, trainer_serve
from tracegrad.store import RolloutSummary, Store
from tracegrad.store.read.held_out import VERSION_TAG
from tracegrad.store.read.versions import VersionHistory
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import is_responding

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SLOW_S = 600.0  # for what takes seconds on an idle machine
KEYS = {"TRACEGRAD_API_KEY": "a" * 32, "TRACEGRAD_PROXY_CONTROL_KEY": "c" * 32}
HELD_OUT = 2
ASK = """
import openai
client = openai.OpenAI(max_retries=0)
messages = [{"role": "user", "content": "Say something."}]
client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
"""


class OwnProxy:
    """Of the page's flags and variables, on a port that stays the same."""

    def __init__(self, engine: str, store_url: str, model: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{find_free_port()}"
        self._log = log
        port = self.url.rpartition(":")[2]
        self._command = [str(Path(sys.executable).with_name("tracegrad")), "proxy"]
        self._command += ["--port", port, "--model", "policy", "--upstream", engine]
        self._command += ["--store", store_url, "--tokenizer", str(model)]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, **KEYS, "TRACEGRAD_PROXY_HELD": "true"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env)
        eventually(lambda: is_responding(self.url, "/healthz"), SLOW_S)
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_char_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    folder = tmp_path_factory.mktemp("engine")
    log = folder / "vllm.log"
    settings = tiny_settings(model, log, max_model_len=512, cache_mib=64)
    with VllmProcess(settings) as process:
        process.wait_healthy(timeout=SLOW_S)
        yield process


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def proxy(engine: VllmProcess, model: Path, state_dir: Path, tmp_path: Path) -> Iterator[OwnProxy]:
    found = OwnProxy(engine.url, f"sqlite:///{state_dir}/store.db", model, tmp_path / "proxy.log")
    yield found
    found.kill()


def settings_of(
    model: Path, engine: VllmProcess, proxy: OwnProxy, tasks: Path
) -> dict[str, object]:
    """Each reward is a sum, of which scorers give a part; each version gathers held-out rollouts,
    which the evaluator makes."""
    tasks.write_text(json.dumps({"id": "ask", "prompt": "hi"}) + "\n")
    return {
        "model": model,
        "ranks": 1,
        "vllm.urls": engine,
        "proxy_url": proxy,
        "data.tags": "{}",
        "batches.groups": 1,
        "batches.group_size": 2,
        "rewards.weights": json.dumps({"reward": 1, "done": 1}),
        "rewards.optional": json.dumps(["reward"]),
        "rewards.commands": json.dumps({"done": "true"}),
        "promotion.gate": "held_out",
        "promotion.max_rollouts": HELD_OUT,
        "promotion.tasks": tasks,
        "promotion.command": json.dumps([sys.executable, "-c", ASK]),
    }


def work(url: str, task: str) -> None:
    """A group of two attempts, of which one is better."""
    admin = {"authorization": f"Bearer {KEYS['TRACEGRAD_API_KEY']}"}
    with httpx.Client(base_url=url, headers=admin, timeout=SLOW_S) as client:
        for n in range(2):
            name = f"{task}-{n}"

            def tell(name: str, *events: dict[str, object]) -> None:
                said = [event | {"rollout_id": name} for event in events]
                client.post("/api/events", json={"events": said}).raise_for_status()

            tell(name, {"type": "rollout_started", "task_id": task})
            messages = [{"role": "user", "content": "Say something."}]
            body = {"model": "policy", "messages": messages, "max_tokens": 16}
            client.post(f"/rollouts/{name}/v1/chat/completions", json=body).raise_for_status()
            reward: dict[str, object] = {"type": "reward", "value": float(n)}
            tell(name, reward, {"type": "rollout_finished", "outcome": "completed"})


def history(run: TrainerServe) -> VersionHistory:
    with Store.open(run.store_url, create=False) as store:
        return store.version_history()


def rollouts(run: TrainerServe) -> list[RolloutSummary]:
    with Store.open(run.store_url, create=False) as store:
        return store.rollouts(limit=None)


def sampled_by(run: TrainerServe, rollout_id: str) -> set[int]:
    with Store.open(run.store_url, create=False) as store:
        turns = store.rollout_turns(rollout_id)
    return {version for turn in turns for version, _ in turn.policy_versions}


def test_serve_trains_through_a_proxy_of_ones_own(
    model: Path,
    engine: VllmProcess,
    proxy: OwnProxy,
    state_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    settings = settings_of(model, engine.url, proxy.url, tmp_path / "tasks.jsonl")
    with trainer_serve(state_dir, settings) as run:
        run.wait(run.is_serving, SLOW_S)
        work(proxy.url, "first")
        run.wait(lambda: run.last_step() >= 1, SLOW_S)
        assert sampled_by(run, "first-0") == {0}
        evaluated = [row for row in rollouts(run) if row.tags.get(VERSION_TAG) == "0"]
        assert len(evaluated) >= HELD_OUT, "no step before the evaluator, with the proxy's key, ran"
        assert all(row.held_out for row in evaluated)
        run.wait(lambda: history(run).records[1].evaluation is not None, SLOW_S)

        proxy.kill()
        proxy.start()
        work(proxy.url, "after")  # waits until rank 0 has told it the version
        assert sampled_by(run, "after-0") == {1}
        run.wait(lambda: run.last_step() >= 2, SLOW_S)
        run.signal(signal.SIGTERM)
        ended = run.ended(SLOW_S)
        ended.is_clean()
        assert ended.code == 0, ended.output
    assert is_responding(proxy.url, "/healthz")
    assert is_responding(engine.url, "/health")
