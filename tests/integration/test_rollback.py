"""A rollback while the ranks train: the earlier version's very weights are served at once, and
training goes on from its checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.agents.group_load import GroupLoad, missing_calls
from support.agents.toy_agents import ToyAgents
from support.trainer.char_model import save_char_model
from support.trainer.trainer_serve import TrainerServe, cli, cli_json, trainer_serve
from tracegrad.store import StepHistory, Store

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [5 + 7 * i % 90 for i in range(40)]
TOKENS = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerServe]:
    folder = tmp_path_factory.mktemp("rollback")
    # Steps that move the weights far enough to be seen in greedy tokens.
    settings = {"model": save_char_model(folder / "model"), "optim.lr": 1e-2}
    with trainer_serve(folder / "state", settings) as run:
        run.wait_serving()
        yield run


async def batch(toys: ToyAgents, number: int) -> None:
    """What one step takes: two groups of four, without the SDK."""
    tasks = (f"task {number}a", f"task {number}b")
    kinds = (toys.by_path, toys.by_key, toys.by_path, toys.by_key)
    await asyncio.gather(*(attempt(task) for task in tasks for attempt in kinds))


def greedy(run: TrainerServe) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    request = {
        "model": "policy",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    transport = httpx.HTTPTransport(uds=run.vllm_url.removeprefix("unix://"))
    if run.vllm_url.startswith("http"):
        transport = httpx.HTTPTransport()
    base = run.vllm_url if run.vllm_url.startswith("http") else "http://vllm"
    with httpx.Client(transport=transport, base_url=base, timeout=60) as client:
        answer = client.post("/v1/completions", json=request)
    answer.raise_for_status()
    [choice] = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def versions(run: TrainerServe) -> dict[str, Any]:
    found: dict[str, Any] = cli_json(
        "trainer", "versions", f"--state-dir={run.state_dir}", "--json"
    )
    return found


def kept(run: TrainerServe) -> list[int]:
    return [one["version"] for one in versions(run)["versions"] if one["kept"]]


def decide(run: TrainerServe, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = cli_json(
        "trainer", *words, f"--state-dir={run.state_dir}", "--json", "--wait=30"
    )
    return found


def served(run: TrainerServe) -> int | None:
    with Store.open(run.store_url, create=False) as store:
        return store.current_version()


def test_an_earlier_version_is_served_while_ranks_train_and_training_goes_on_from_it(
    run: TrainerServe,
) -> None:
    toys = ToyAgents(run.url)
    of_version = {}
    for step in (1, 2):
        asyncio.run(batch(toys, step))
        run.wait(lambda step=step: run.is_idle_after(step=step))
        of_version[step] = greedy(run)
    assert of_version[1] != of_version[2], "the steps are to be told apart"
    run.wait(lambda: {0, 1, 2} <= set(kept(run)))
    assert decide(run, "pin", "1", "--why", "it is the one")["outcome"] == {"version": 1}

    with GroupLoad(run.url, patient=True) as load:
        run.wait(lambda: run.last_step() > 2 and run.doing() == "training")
        before = run.pid_of("ranks")
        done = decide(run, "rollback", "1", "--why", "replies are empty", "--training", "pause")
        assert greedy(run) == of_version[1]
        assert done["outcome"]["served"] is True
        # docs/training.md has the figure: a machine under load has no bound.
        print(f"served {done['acted_at'] - done['created_at']:.2f} s after the command")

        # The ranks begin again, with the same weights under a number of their own, and wait.
        run.wait(lambda: run.doing() == "held" and run.pid_of("ranks") != before, 180)
        again = served(run)
        assert again is not None
        assert again > done["outcome"]["newest"]
        assert greedy(run) == of_version[1]
        at = run.last_step()
        assert at == done["outcome"]["last_step"]
        status = cli("trainer", "status", f"--state-dir={run.state_dir}")
        assert "replies are empty (trainer resume)" in status
        seen = len(load.toys.seen)
        run.wait(lambda: len(load.toys.seen) > seen + 8)  # calls are served
        assert run.last_step() == at

        decide(run, "resume", "--why", "go on")
        run.wait(lambda: run.last_step() > at)
        assert load.failures == []

    with Store.open(run.store_url, create=False) as store:
        history = StepHistory(store)
        first, after = history.step(1), history.step(at + 1)
    assert first is not None
    assert after is not None
    assert after.parent_digest == first.manifest_digest
    assert after.version == again + 1
    shown = {one["version"]: one for one in versions(run)["versions"]}
    assert shown[1]["kept"]
    assert shown[1]["pinned"]
    assert shown[2]["state"] == "rolled_back"
    assert shown[again]["weights_step"] == 1
    assert missing_calls(run.store_url, [toys, load.toys]) == []


@pytest.mark.slow  # `tests/unit/trainer/promotion/test_version_control.py` has where it goes
def test_a_rollback_without_a_version_goes_back_and_trains_on(run: TrainerServe) -> None:
    """After the one above: the default is the last good version before what is served."""
    with GroupLoad(run.url, patient=True):
        at = run.last_step()
        run.wait(lambda: run.last_step() > at + 1 and run.doing() == "training")
        done = decide(run, "rollback", "--why", "worse again")
        back = done["outcome"]["version"]
        assert back < done["outcome"]["from"]
        run.wait(lambda: run.last_step() > done["outcome"]["last_step"], 180)
    with Store.open(run.store_url, create=False) as store:
        history = store.version_history()
        assert history.paused is None
        assert history.records[done["outcome"]["from"]].state == "rolled_back"
