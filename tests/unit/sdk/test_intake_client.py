"""Drivers wait for places, and what they open next takes them."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

import tracegrad
from support.sdk.fake_proxy import FakeProxy
from tracegrad.intake_client import take_place
from tracegrad.transport import ProxyRefused

PATH = "/api/intake"


def answer(*ids: str, **fields: object) -> bytes:
    given = {"rollout_ids": list(ids), "paced": True, "version": 3, "reason": "", **fields}
    return json.dumps({"retry_after_s": 0.01, **given}).encode()


@pytest.fixture(autouse=True)
def _no_places() -> None:
    while take_place() is not None:
        pass


def test_what_is_opened_next_takes_the_places(proxy: FakeProxy) -> None:
    proxy.answer = answer("p1", "p2")
    found = tracegrad.wait_for_intake(2)
    assert (found.rollouts, found.rollout_ids, found.version) == (2, ("p1", "p2"), 3)
    assert json.loads(proxy.sent_to(PATH)[0].body)["rollouts"] == 2
    with tracegrad.rollout("t") as outer, tracegrad.rollout("t") as inner:
        assert inner.id != "p2", "a rollout inside of another is no attempt of the driver's"
    with tracegrad.rollout("t") as second, pytest.raises(LookupError):
        raise LookupError
    with tracegrad.rollout("t") as third:
        pass
    assert [outer.id, second.id] == ["p1", "p2"]
    assert third.id not in ("p1", "p2")
    proxy.answer = b"{}"


def test_tasks_and_threads_of_the_driver_share_its_places(proxy: FakeProxy) -> None:
    async def drive() -> set[str]:
        found = await tracegrad.intake()
        ids = []

        async def attempt() -> None:
            async with tracegrad.rollout("t") as opened:
                ids.append(opened.id)

        await asyncio.gather(*(attempt() for _ in range(found.rollouts)))
        return set(ids)

    proxy.answer = answer("a", "b", "c")
    assert asyncio.run(drive()) == {"a", "b", "c"}
    assert "rollouts" not in json.loads(proxy.sent_to(PATH)[0].body), "a group, as large as it is"
    proxy.answer = b"{}"


def test_it_waits_until_there_is_room_and_says_how_long_it_has(proxy: FakeProxy) -> None:
    proxy.answer = answer(reason="data.in_flight = 4: 4 open")
    found: list[tracegrad.Intake] = []
    driver = threading.Thread(target=lambda: found.append(tracegrad.wait_for_intake(1)))
    driver.start()
    while len(proxy.sent_to(PATH)) < 3:
        driver.join(0.005)
    assert not found
    proxy.answer = answer("p")
    driver.join(20)
    assert found[0].rollout_ids == ("p",)
    assert found[0].waited_s > 0
    said = [json.loads(call.body)["waited_s"] for call in proxy.sent_to(PATH)]
    assert said == sorted(said)
    assert said[-1] > 0


def test_a_wait_has_an_end_where_one_is_asked_for(proxy: FakeProxy) -> None:
    proxy.answer = answer(reason="data.in_flight = 4: 4 open")
    with pytest.raises(TimeoutError, match=r"no rollout may be opened after .*data\.in_flight = 4"):
        tracegrad.wait_for_intake(1, timeout_s=0.03)


def test_a_proxy_that_is_away_is_waited_for(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracegrad.intake_client._UNREACHABLE_RETRY_S", 0.01)
    proxy.statuses[PATH] = [503, 502]
    proxy.answer = answer("p")
    assert tracegrad.wait_for_intake(1).rollout_ids == ("p",)
    proxy.mode = 503
    with pytest.raises(TimeoutError, match="it answers 503"):
        tracegrad.wait_for_intake(1, timeout_s=0.03)
    proxy.mode = "ok"


def test_a_wrong_ask_is_refused_at_once(proxy: FakeProxy) -> None:
    proxy.statuses[PATH] = [422]
    with pytest.raises(ProxyRefused):
        tracegrad.wait_for_intake(10**6)


def test_without_an_ask_rollouts_wait_for_nobody(proxy: FakeProxy) -> None:
    with tracegrad.rollout("t"):
        pass
    assert proxy.sent_to(PATH) == []
