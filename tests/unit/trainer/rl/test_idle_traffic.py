"""Traffic that nobody enqueued is trained: calls through the proxy, feedback on their answers, and
nothing else. The engine is a mock one; proxy, store, ledger and optimizer steps are real."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import httpx
import pytest
import torch
from rich.console import Console

from support.cli.run_rollouts import printed, printed_json
from support.engines.byte_tokenizer import save_byte_tokenizer
from support.engines.mock_engine import MODEL, Answer, MockEngine
from support.proxy.servers import serving
from support.store.ledger_fixtures import FakeClock
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.trainer.step_samples import trainer_settings
from support.trainer.tiny_model import tiny_qwen3
from tracegrad.proxy import create_app
from tracegrad.settings_sources import SettingsError
from tracegrad.store import GroupCommitWriter, StepHistory, Store
from tracegrad_trainer.batches import Row
from tracegrad_trainer.cli import dry_run
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.rl.coordinator import RolloutSupply
from tracegrad_trainer.rl.train_loop import TrainLoop
from tracegrad_trainer.rl.wait_reason import BatchNeeds, wait_reason

IDLE_S = 60.0
LONG_S = 1e5  # whatever the machine is busy with: proxies date calls by the real clock
VOCABULARY = 264  # the mock engine's bytes, roles and end


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    tiny_qwen3(VOCABULARY).save_pretrained(tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model")
    return trainer_settings(
        tmp_path,
        data={"idle_s": IDLE_S},
        batches={"groups": 2, "group_size": 1, "tokens_per_micro_batch": 1024},
        objective={"advantage": "running"},
    )


@dataclass
class Service:
    """Users who talk to the model through the proxy's plain address."""

    http: httpx.Client
    engine: MockEngine
    store: Store
    clock: FakeClock
    talks: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def ask(self, user: str, text: str, reply: str) -> str:
        """The id of the answer, which is all that an application knows."""
        self.engine.replies.append(Answer(reply))
        talk = self.talks.setdefault(user, [{"role": "system", "content": f"You serve {user}."}])
        talk.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": talk, "temperature": 1.0}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        talk.append({"role": "assistant", "content": reply.strip()})
        return str(answer.json()["id"])

    def rate(self, answer: str, thumbs: str) -> str:
        """The rollout that it was given to."""
        given = self.http.post("/api/feedback", json={"response_id": answer, "thumbs": thumbs})
        assert given.status_code == 200, given.text
        return str(given.json()["rollout_id"])


@pytest.fixture
def service(settings: TrainerSettings, fake_clock: FakeClock) -> Iterator[Service]:
    engine = MockEngine(takes_ids=True)
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(settings.proxy.store))
        writer = stack.enter_context(GroupCommitWriter(store))
        upstream = stack.enter_context(serving(engine.app(), lifespan="off"))
        proxy = settings.proxy.model_copy(
            update={"upstream": upstream, "tokenizer": settings.model}
        )
        url = stack.enter_context(serving(create_app(proxy, store=store, writer=writer)))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=20))
        yield Service(http, engine, store, fake_clock)


def train(settings: TrainerSettings) -> list[Row]:
    """One step, as `trainer step` takes it; the rows that it was made of."""
    with ExitStack() as stack:
        training = TrainLoop(
            settings, stack, stopping=lambda: False, supply=RolloutSupply(is_open=False)
        )
        training.resume()
        assert training.next_action() == "train"
        assert training.batch is not None
        rows = training.batch.selection.rows
        assert training.train_batch()
        training.commit_pending()
    return list(rows)


def planned(settings: TrainerSettings) -> str:
    out = StringIO()
    dry_run.show_dry_run(settings, Console(file=out, width=200), as_json=False)
    return out.getvalue()


def waits(settings: TrainerSettings, store: Store) -> str:
    return wait_reason(store, BatchNeeds.of(settings.stored(), None)).text


def test_calls_and_thumbs_are_enough(settings: TrainerSettings, service: Service) -> None:
    first = {user: service.ask(user, "Hello", "Good day. ") for user in ("ann", "bob")}
    rollouts = [service.rate(first["ann"], "up"), service.rate(first["bob"], "down")]
    service.clock.now = time.time() + 20
    waiting = "2 rollouts that nobody opened are open: the first idle for 2. s of 60 .data.idle_s."
    assert re.search(waiting, waits(settings, service.store))
    assert re.search(waiting, planned(settings))
    assert "nothing to train" in planned(settings)
    service.clock.advance(LONG_S)
    plan = planned(settings)
    assert "2 rollouts would be closed after 60 s without a call (data.idle_s)" in plan
    assert "step 1 on version 0: 2 groups, 2 turns" in plan
    assert "turns that no step would look at" not in plan
    rows = train(settings)
    assert {row.rollout_id for row in rows} == set(rollouts)
    assert {service.store.rollout(name).summary.consumed_step for name in rollouts} == {1}

    # Both go on: one is rated again, the other is not.
    second = service.ask("ann", "And more?", "No. ")
    service.ask("bob", "And more?", "Yes. ")
    later = service.rate(second, "down")
    assert later not in rollouts
    service.clock.advance(LONG_S)
    [row] = train(settings)
    assert row.rollout_id == later
    # The conversation so far is what it was sampled after, and is not trained again.
    trained = row.input_ids[row.loss_mask.astype(bool)].tolist()
    assert trained == Answer("No. ").token_ids
    assert b"Good day. " in bytes(token for token in row.input_ids.tolist() if token < 128)
    steps = StepHistory(service.store).steps()
    assert [step.metrics["turns_trained"] for step in steps] == [2, 1]
    # Its thumb is below the mean of those before.
    assert row.advantage[row.loss_mask.astype(bool)].max() < 0 < steps[1].metrics["grad_norm"]
    counts = service.store.turn_counts(compared=False)
    assert (counts.captured, counts.trained, counts.pending) == (4, 3, {"no_reward": 1})

    url = f"sqlite:///{settings.state_dir / 'store.db'}"
    shown = " ".join(printed(url, "explain", later).split())
    assert "closed after 60 s without a call" in shown
    assert f"it goes on from rollout {rollouts[0]}, which training had taken" in shown
    assert "rollout_taken" in shown
    assert "60s, closed" in printed(url, "ls", columns=140)
    listed = {row["rollout_id"]: row for row in printed_json(url, "ls")}
    assert (listed[later]["continues"], listed[later]["idle_s"]) == (rollouts[0], IDLE_S)
    assert "closed after 60 s" in printed(url, "show", later, columns=None)


def test_without_the_setting_the_line_that_closes_them_is_said(
    settings: TrainerSettings, service: Service
) -> None:
    never = settings.model_copy(update={"data": settings.data.model_copy(update={"idle_s": None})})
    answer = service.ask("ann", "Hello", "Good day.")
    rollout = service.rate(answer, "up")
    service.clock.advance(LONG_S)
    fix = "--set data.idle_s=60 closes those without a call for 60 s"
    for said in (planned(never), waits(never, service.store)):
        assert "1 rollout that nobody opened is open, and nobody ends them" in said
        assert fix in said
    with ExitStack() as stack:
        training = TrainLoop(
            never, stack, stopping=lambda: False, supply=RolloutSupply(is_open=False)
        )
        training.resume()
        assert training.next_action() == "idle"
    assert service.store.rollout(rollout).summary.state == "open"
    url = f"sqlite:///{settings.state_dir / 'store.db'}"
    shown = " ".join(printed(url, "explain", rollout).split())
    assert "Nobody opened its rollout, and nobody has ended it: idle for" in shown
    assert "--set data.idle_s=60" in shown


@pytest.mark.parametrize("wrong", ["0", "-1", "inf", "nan", '"soon"'])
def test_a_time_that_is_none_is_refused_by_name(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"data\.idle_s"):
        load_settings(None, [f"model={tmp_path}", f"data.idle_s={wrong}"])
