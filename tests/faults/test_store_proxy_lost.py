"""The proxy without its store: calls wait for a server that is started again; after a while 503
and when to come back, an error in streams that have begun; the same process goes on by itself, and
nothing that a client saw the end of is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.agents.conversation_load import ConversationLoad, FailedCall, lost_calls
from support.engines.mock_engine import MockEngine
from support.proxy.proxy_process import ProxyProcess
from support.proxy.servers import eventually, serving
from support.store.durability_check import integrity
from support.store.postgres_crash import Crashing, crashing
from support.system.small_disk import SmallDisk, small_disk
from tracegrad.proxy import create_app, store_async
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import GroupCommitWriter, Store

_CALLERS = 6
_AT_ONCE_S = 10.0  # a server that is gone is noticed without any waiting
_QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture
def engine_url() -> Iterator[str]:
    with serving(MockEngine().app(), lifespan="off") as url:
        yield url


@pytest.fixture
def database() -> Iterator[Crashing]:
    with crashing() as found:
        yield found


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk | None]:
    with small_disk(request, tmp_path / "small", mib=32) as disk:
        yield disk


def test_calls_wait_for_a_postgresql_that_is_started_again(
    engine_url: str, database: Crashing, tmp_path: Path
) -> None:
    store_url = database.server.new_database()
    proxy = ProxyProcess(engine_url, store_url, tmp_path / "proxy.log")
    proxy.start()
    try:
        with ConversationLoad(proxy.url, _CALLERS) as callers:
            for go_away in (database.stop, database.kill, database.kill, database.kill):
                _goes_on(callers)
                go_away()
                database.start()
            _goes_on(callers)
        assert proxy.runs, "it was never started again"
    finally:
        proxy.close()
    assert not callers.failed, callers.failed
    with Store.open(store_url) as store:
        faults = [*lost_calls(store, callers), *integrity(store)]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])


def test_a_postgresql_that_stays_away_for_long(
    engine_url: str,
    database: Crashing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(store_async, "RECONNECT_S", 0.5)
    settings = ProxySettings(upstream=engine_url)
    with (
        Store.open(database.server.new_database()) as store,
        GroupCommitWriter(store, reconnect_s=0.5) as writer,
    ):
        with (
            serving(create_app(settings, store=store, writer=writer)) as url,
            ConversationLoad(url, _CALLERS) as callers,
        ):
            for go_away in (database.stop, database.kill):
                _goes_on(callers)
                go_away()
                time.sleep(0.1)  # what was committed before is told by now
                ended, failed = len(callers.ended), len(callers.failed)
                eventually(lambda seen=failed: _every_kind(callers.failed[seen:]), 60)
                _every_door_is_503(url)
                assert len(callers.ended) == ended, "calls ended without a store"
                database.start()
            _goes_on(callers)
        # It may be asked twice: for what the call goes on from, and for its commit.
        _were_told_to_come_back(callers.failed, 2 * 0.5 + _AT_ONCE_S)
        assert not [*lost_calls(store, callers), *integrity(store)]
    assert caplog.text.count("the store can be written again") == 2


def test_a_disk_that_is_full_for_a_while(
    engine_url: str, disk: SmallDisk | None, tmp_path: Path
) -> None:
    if disk is None:
        return
    store_url = f"sqlite:///{disk.folder}/store.db"
    proxy = ProxyProcess(engine_url, store_url, tmp_path / "proxy.log")
    proxy.start()
    try:
        with ConversationLoad(proxy.url, _CALLERS) as callers:
            for _ in range(2):
                _goes_on(callers)
                failed = len(callers.failed)
                with disk.filled():
                    # SQLite first uses up the room in the files that it has.
                    eventually(lambda seen=failed: _every_kind(callers.failed[seen:]), 60)
                    refusal = next(each for each in callers.failed[failed:] if each.in_stream)
                    assert "disk is full" in refusal.message
            _goes_on(callers)
        assert proxy.runs, "it was never started again"
    finally:
        proxy.close()
    _were_told_to_come_back(callers.failed, _AT_ONCE_S)
    with Store.open(store_url) as store:
        faults = [*lost_calls(store, callers), *integrity(store)]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])


def test_a_store_that_does_not_answer_holds_nobody_for_good(
    engine_url: str, database: Crashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_async, "STORE_TIMEOUT_S", 0.5)
    settings = ProxySettings(upstream=engine_url)
    with Store.open(database.server.new_database()) as store, GroupCommitWriter(store) as writer:
        with (
            serving(create_app(settings, store=store, writer=writer)) as url,
            ConversationLoad(url, _CALLERS) as callers,
        ):
            _goes_on(callers)
            with database.frozen():
                failed = len(callers.failed)
                eventually(lambda: _every_kind(callers.failed[failed:]), 30)
                _every_door_is_503(url)
            _goes_on(callers)
        _were_told_to_come_back(callers.failed, 0.5 + _AT_ONCE_S)
        assert lost_calls(store, callers) == []


def _goes_on(callers: ConversationLoad) -> None:
    """Calls, streamed and not, and rewards, come to their ends."""
    ended, rewarded = len(callers.ended), len(callers.rewarded)
    eventually(lambda: len(callers.rewarded) > rewarded + 2 * callers.count, 60)
    assert len(callers.ended) > ended


def _every_kind(failed: Sequence[FailedCall]) -> bool:
    """Refused before an answer began, and within one that had."""
    return {each.in_stream for each in failed} == {True, False} and len(failed) > 20


def _were_told_to_come_back(failed: Sequence[FailedCall], within_s: float) -> None:
    for each in failed:
        if each.in_stream:
            assert "the store cannot be written" in each.message, each
        else:
            assert each.status == 503, each
            assert int(each.retry_after or 0) >= 1, each
            assert "store" in each.message, each
        assert each.seconds < within_s, each


def _every_door_is_503(url: str) -> None:
    """Also those that callers do not use."""
    chat = {"model": "m", "messages": _QUESTION}
    earlier = f"resp_{'0' * 32}"
    span = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "look_up"}
    spans = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    doors: list[tuple[str, dict[str, object], dict[str, str]]] = [
        ("/v1/chat/completions", chat, {}),
        ("/v1/messages", {**chat, "max_tokens": 9}, {}),
        ("/v1/responses", {"model": "m", "input": "hello"}, {}),
        ("/v1/responses", {"model": "m", "input": "x", "previous_response_id": earlier}, {}),
        ("/v1/completions", {"model": "m", "prompt": "hello"}, {}),
        ("/v1/chat/completions", chat, {"authorization": f"Bearer tg-r.{'k' * 43}"}),
        ("/v1/traces", spans, {}),
        ("/api/events", {"events": [{"type": "rollout_started", "rollout_id": "r"}]}, {}),
    ]
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(len(doors)) as together,
    ):

        def opened(door: tuple[str, dict[str, object], dict[str, str]]) -> httpx.Response:
            path, body, headers = door
            return client.post(path, json=body, headers=headers)

        for door, answer in zip(doors, together.map(opened, doors), strict=True):
            assert answer.status_code == 503, f"{door}: {answer.text}"
            assert int(answer.headers["retry-after"]) >= 1, door


def test_a_repeated_call_is_not_an_inner_error_without_a_store(
    engine_url: str, database: Crashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recorded answer cannot be read."""
    monkeypatch.setattr(store_async, "RECONNECT_S", 0.5)
    settings = ProxySettings(upstream=engine_url)
    body = {"model": "m", "messages": _QUESTION}
    with (
        Store.open(database.server.new_database()) as store,
        GroupCommitWriter(store) as writer,
        serving(create_app(settings, store=store, writer=writer)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        path = "/rollouts/r/v1/chat/completions"
        first = client.post(path, json=body).json()
        database.stop()
        again = {"x-stainless-retry-count": "1"}
        refused = client.post(path, json=body, headers=again)
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) >= 1
        database.start()
        assert client.post(path, json=body, headers=again).json()["id"] == first["id"]
