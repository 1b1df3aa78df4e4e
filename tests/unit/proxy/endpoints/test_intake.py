"""Drivers ask for places; calls of rollouts that have not begun may wait for one."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from support.engines.mock_engine import MODEL
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.servers import eventually
from support.store.intake_requests import intake_request
from tracegrad.store import Store
from tracegrad.store.ledger.intake import Intake

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def ask(http: httpx.Client, **wanted: Any) -> httpx.Response:
    return http.post("/api/intake", json=wanted)


def call(http: httpx.Client, rollout_id: str) -> int:
    return http.post(f"/rollouts/{rollout_id}/v1/chat/completions", json=BODY).status_code


def finish(http: httpx.Client, rollout_id: str) -> None:
    ended = {"type": "rollout_finished", "rollout_id": rollout_id, "outcome": "env_error"}
    assert http.post("/api/events", json={"events": [ended]}).status_code == 200


def start(http: httpx.Client, rollout_id: str, **fields: Any) -> None:
    started = {"type": "rollout_started", "rollout_id": rollout_id, **fields}
    assert http.post("/api/events", json={"events": [started]}).status_code == 200


def test_without_a_trainer_everything_may_be_opened(rig: ProxyWithEngine) -> None:
    answer = ask(rig.http, rollouts=3)
    assert answer.status_code == 201
    found = answer.json()
    assert (found["paced"], found["rollouts"], len(found["rollout_ids"])) == (False, None, 3)
    assert rig.http.post("/api/intake").json()["rollout_ids"], "one, without a word"


def test_without_room_the_answer_is_202_and_when_to_come_back(rig: ProxyWithEngine) -> None:
    wanted = intake_request(in_flight=4, version=3, step_s=2.0)
    Intake(rig.store).request(wanted, stepped=True)
    places = ask(rig.http).json()
    assert (places["attempts"], len(places["rollout_ids"]), places["version"]) == (2, 2, 3)
    ask(rig.http, rollouts=2)
    refused = ask(rig.http)
    assert refused.status_code == 202
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["reason"].startswith("data.in_flight = 4: 4 open")
    assert refused.json()["rollout_ids"] == []
    looked = rig.http.get("/api/intake").json()
    assert (looked["rollouts"], looked["counts"]["open"]) == (0, 4)
    assert looked["limits"]["in_flight"] == 4


def test_a_place_is_the_rollout_that_is_opened_in_it(rig: ProxyWithEngine) -> None:
    Intake(rig.store).request(intake_request(in_flight=4))
    [*places] = ask(rig.http, rollouts=4).json()["rollout_ids"]
    assert call(rig.http, places[0]) == 200
    finish(rig.http, places[0])
    assert ask(rig.http, rollouts=1).status_code == 201


def test_who_asks_for_more_than_can_ever_be_open_is_told(rig: ProxyWithEngine) -> None:
    Intake(rig.store).request(intake_request(in_flight=4))
    refused = ask(rig.http, rollouts=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "rollouts")
    assert "ask for fewer" in refused.json()["error"]["message"]


@pytest.mark.parametrize("wanted", [{"rollouts": 0}, {"rollouts": "x"}, {"waited_s": -1}, {"a": 1}])
def test_a_wrong_ask_is_named(wanted: dict[str, Any], rig: ProxyWithEngine) -> None:
    assert ask(rig.http, **wanted).status_code == 422


def test_a_rollouts_key_holds_no_places(serve_proxy: ServeProxy) -> None:
    with serve_proxy(admin_key="an-admin-key-of-the-tests") as http:
        agent = {"authorization": "Bearer tg-r1.wrong"}
        assert http.post("/api/intake", headers=agent).status_code in (401, 403)


def test_pure_traffic_is_never_refused(rig: ProxyWithEngine) -> None:
    Intake(rig.store).request(intake_request(in_flight=4))
    ask(rig.http, rollouts=4)
    assert call(rig.http, "somebody") == 200


def test_metrics_count_asks_places_and_the_time_waited(rig: ProxyWithEngine) -> None:
    Intake(rig.store).request(intake_request(in_flight=4))
    ask(rig.http, rollouts=4, waited_s=2.5)
    ask(rig.http, rollouts=1)
    lines = rig.http.get("/metrics").text.splitlines()
    for line in (
        'tracegrad_proxy_intake_asks_total{answer="granted"} 1',
        'tracegrad_proxy_intake_asks_total{answer="wait"} 1',
        "tracegrad_proxy_intake_places_total 4",
        "tracegrad_proxy_intake_waited_seconds_total 2.5",
    ):
        assert line in lines


def in_thread(http: httpx.Client, rollout_id: str, done: list[str]) -> threading.Thread:
    def run() -> None:
        assert call(http, rollout_id) == 200
        done.append(rollout_id)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_first_call_of_a_rollout_waits_for_room(serve_proxy: ServeProxy, store: Store) -> None:
    tags = {"split": "train"}
    Intake(store).request(intake_request(in_flight=4, tags=tags))
    with serve_proxy(pace_calls=True) as http:
        for number in range(6):
            start(http, f"r{number}", tags=tags)
        start(http, "exam", tags={"split": "held_out"})
        for number in range(4):
            assert call(http, f"r{number}") == 200
        done: list[str] = []
        waiting = [in_thread(http, "r4", done)]
        eventually(lambda: 'calls_waiting{at="intake"} 1' in http.get("/metrics").text)
        assert call(http, "r0") == 200, "it has begun"
        assert call(http, "exam") == 200, "it is not selected"
        assert http.post("/v1/chat/completions", json=BODY).status_code == 200, "nobody named it"
        assert done == []
        finish(http, "r1")
        waiting[0].join(20)
        assert done == ["r4"]
        [placed] = [
            line for line in http.get("/metrics").text.splitlines() if 'how="placed"' in line
        ]
        assert placed.endswith(" 5")


def test_a_call_that_has_waited_long_enough_is_let_in(
    serve_proxy: ServeProxy, store: Store
) -> None:
    Intake(store).request(intake_request(in_flight=4))
    with serve_proxy(pace_calls=True, max_wait_s=0.3) as http:
        for number in range(5):
            start(http, f"r{number}")
            assert call(http, f"r{number}") == 200
        assert 'paced_rollouts_total{how="let_in"} 1' in http.get("/metrics").text
