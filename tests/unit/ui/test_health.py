"""The page of health: the proxy, the trainer, what waits for training, the store's check."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from support.cli.sample_rollouts import trained_samples
from support.store.events import rollout_events
from support.store.ledger_fixtures import fill
from support.ui.policy_versions import decided
from tracegrad.events import Json
from tracegrad.proxy.metrics.counters import MetricCells, ProxyMetrics
from tracegrad.proxy.metrics.names import DOWN, UP
from tracegrad.proxy.metrics.proxy_state import proxy_state
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad.store.ledger.readiness import NewestStates, newest_states
from tracegrad.ui.app import make_ui, ui_routes
from tracegrad.ui.pages import health
from tracegrad.ui.pages.health import _COMPOSING, QUEUE, DoctorDesk
from tracegrad.ui.proxy_state import ProxyState
from tracegrad.ui.security import Sessions
from tracegrad_trainer.rewards.config import COMPOSING

from .conftest import token_in
from .test_rollout import text_of
from .test_untrusted import Elements

Browse = Callable[..., TestClient]
STATE = ProxyState(
    version=7, workers=[11, 12], in_flight=3, waiting={"gate": 2}, held=True,
    up={"http://a:1": True, "http://<b>:2": False, "http://c:3": None},
    calls={"2xx": 1200, "5xx": 4}, turns=1190, untrainable={"greedy": 10},
    lost={"refused": 1}, submissions=5, submission_bytes=2_500_000,
)  # fmt: skip


def browser_at(store: Store, state: ProxyState) -> TestClient:
    async def find_state() -> ProxyState:
        return state

    page = make_ui(store, sessions=Sessions(None), find_state=find_state)
    return TestClient(Starlette(routes=ui_routes(page)), base_url="http://127.0.0.1:4141")


def test_an_empty_store_is_well(browse: Browse) -> None:
    said = text_of(browse().get("/ui/health").text)
    assert "No proxy: this is a store by itself." in said
    assert "never asked for rollouts" in said
    assert "Last step none yet" in said
    assert "None: all that was captured is trained or skipped" in said


def test_the_proxy_says_how_it_is(store: Store) -> None:
    page = browser_at(store, STATE).get("/ui/health").text
    said = text_of(page)
    assert "2 workers: 11, 12" in said
    assert "Version served 7 weights are being pushed" in said
    assert "3 in flight; waiting for weights (gate), a model server (engine)" in said
    assert "a place (intake): gate 2" in said
    assert "2xx 1,200 · 5xx 4" in said
    assert "1,190; not trainable: greedy 10" in said
    assert "Turns lost refused 1" in said
    assert "5 submissions, 2.5 MB" in said
    assert "http://a:1 up" in said
    assert "http://c:3 no call yet" in said
    found = Elements()
    found.feed(page)
    assert found.foreign == []
    well = replace(STATE, lost={}, held=False, up={})
    said = text_of(browser_at(store, well).get("/ui/health").text)
    assert "Turns lost none" in said
    assert "Model server" not in said


def test_what_metrics_say_of_all_workers() -> None:
    cells = MetricCells(2, ["http://a:1", "http://b:2", "http://c:3"])
    one, two = ProxyMetrics(cells, 0), ProxyMetrics(cells, 1)
    for worker, server, up in ((one, "a:1", UP), (two, "a:1", DOWN), (two, "b:2", DOWN)):
        worker.set("upstream_up", f"http://{server}", value=up)
    for worker in (one, two):
        worker.set("calls_in_flight", value=2.0)
        worker.set("calls_waiting", "engine", value=1.0)
        worker.add("calls_total", "chat", "2xx", number=5)
        worker.add("calls_total", "completions", "2xx", number=1)
        worker.add("turns_committed_total", number=4)
    two.add("turns_lost_total", "refused")
    two.set("gate_held", value=1.0)
    sampled: list[int] = []
    one.samplers.append(lambda: sampled.append(1))
    writer = {"submissions": 3, "bytes": 9, "refused": 0, "unacknowledged": 0}
    found = proxy_state(one, {"version": 4, "writer": writer}, own_pid=77)
    assert sampled == [1]
    assert found == ProxyState(
        version=4, workers=[77], in_flight=4, waiting={"engine": 2}, held=True,
        up={"http://a:1": False, "http://b:2": False, "http://c:3": None},
        calls={"2xx": 12}, turns=8, untrainable={}, lost={"refused": 1},
        submissions=3, submission_bytes=9,
    )  # fmt: skip
    alone = proxy_state(ProxyMetrics(), {"version": 0, "writer": writer, "workers": [5]}, 77)
    assert (alone.up, alone.workers, alone.in_flight, alone.held) == ({}, [5], 0, False)


def test_the_trainer_and_what_waits_for_it(store: Store, browse: Browse) -> None:
    fill(store, tasks=1, size=2)
    store.append(rollout_events("open", outcome=None))
    settings = {"data": {"tags": {"split": "train"}}, "batches": {"group_size": 2}}
    last = StepRecord(step=13, version=7, settings=settings)
    Ledger(store).commit_step(last, trained=[], skipped={}, rollouts=[])
    decided(store, "pause", reason="<i>night</i>")
    page = browse().get("/ui/health").text
    said = text_of(page)
    assert "step 13, version 7" in said
    assert "paused by ann@host: &lt;i&gt;night&lt;/i&gt;" in said
    assert "As the last step selected them: split=train" in said
    assert "not selected 3 Its rollout lacks a tag that training selects by." in said


def test_the_queue_is_counted_up_to_a_bound(store: Store) -> None:
    fill(store, tasks=3, size=2)
    store.append(rollout_events("open", outcome=None))
    with store.reading() as connection:
        every = newest_states(connection, {}, compared=True, most=QUEUE)
        some = newest_states(connection, {}, compared=True, most=4)
        alone = newest_states(connection, {"split": "none"}, compared=True, most=QUEUE)
    assert every == NewestStates({"waiting": 6, "open": 1}, is_cut=False)
    assert some == NewestStates({"waiting": 4, "open": 1}, is_cut=True)
    assert alone == NewestStates({"not_selected": 7}, is_cut=False)


def test_a_queue_that_was_not_looked_at_whole_says_so(
    store: Store, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, tasks=2, size=2)
    assert "Not all of them" not in text_of(browse().get("/ui/health").text)
    monkeypatch.setattr(health, "QUEUE", 3)
    said = text_of(browse().get("/ui/health").text)
    assert "of the 3 that were opened last, and of the 3 that ended last" in said


def test_a_composed_reward_waits_for_its_sum(store: Store, browse: Browse) -> None:
    """As the trainer's own count has it."""
    fill(store, tasks=1, size=2)
    settings = {"batches": {"group_size": 2}, "rewards": {"functions": {"good": "rules:good"}}}
    last = StepRecord(step=1, version=1, settings=settings)
    Ledger(store).commit_step(last, trained=[], skipped={}, rollouts=[])
    said = text_of(browse().get("/ui/health").text)
    assert "no reward 2" in said
    assert "waiting 2" not in said
    assert set(_COMPOSING) == set(COMPOSING), "as the trainer has it"


@pytest.mark.parametrize(
    "settings",
    [{"data": []}, {"data": {"tags": ["a"]}}, {"data": {"tags": {"a": 1}}}, {"batches": [2]},
     {"batches": {"group_size": "many"}}, {"rewards": "none"}],
)  # fmt: skip
def test_settings_that_cannot_be_read_cost_no_page(
    store: Store, browse: Browse, settings: Json
) -> None:
    last = StepRecord(step=1, version=1, settings=settings)
    Ledger(store).commit_step(last, trained=[], skipped={}, rollouts=[])
    answer = browse().get("/ui/health")
    assert answer.status_code == 200
    assert "The last step's settings cannot be read" in text_of(answer.text)


def test_the_store_is_checked_when_asked(store: Store, tmp_path: Path, browse: Browse) -> None:
    trained_samples(store)
    client = browse()
    assert client.post("/ui/health").status_code == 403, "nobody sent it from the page"
    fields = {"csrf": token_in(client.get("/ui/health").text)}
    said = text_of(client.post("/ui/health", data=fields).text)
    assert f"of {len(store.rollouts(limit=None))} rollouts read" in said
    assert "broken" not in said.replace("nothing is broken", "")
    with sqlite3.connect(tmp_path / "store.db") as damaged:
        damaged.execute("PRAGMA foreign_keys = OFF")
        damaged.execute("DELETE FROM turns WHERE turn_id = (SELECT turn_id FROM turn_ledger)")
    said = text_of(client.post("/ui/health", data=fields).text)
    assert "broken" in said
    assert "tracegrad doctor --fix takes it out: its turn is gone" in said


def test_one_check_at_a_time(store: Store) -> None:
    desk = DoctorDesk()
    assert desk.examine(store) is not None
    desk._busy.acquire()
    assert desk.examine(store) is None
    desk._busy.release()
    assert desk.examine(store) is not None
