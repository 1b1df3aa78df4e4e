"""Streams that have nothing to say for a while are kept alive."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import openai
import pytest
from starlette.types import Message

from support.engines.mock_engine import MODEL, Answer, MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.servers import CONTROL, CONTROL_KEY
from support.proxy.upstream_pool import until
from tracegrad.events import Turn
from tracegrad.proxy import app
from tracegrad.proxy.http.streaming_response import StreamedResponse
from tracegrad.store import Store

Turns = Callable[..., list[Turn]]
HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/rollouts/r1/v1/chat/completions"


@pytest.fixture
def impatient(serve_proxy: ServeProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A proxy that says something after 50 ms of silence."""
    monkeypatch.setattr(app, "KEEPALIVE_S", 0.05)
    with serve_proxy(control_key=CONTROL_KEY) as client:
        yield str(client.base_url).rstrip("/")


def test_a_silent_engine_is_covered_by_comments(
    engine: MockEngine, impatient: str, turns: Turns
) -> None:
    engine.replies.append(Answer("At last, an answer."))
    go = engine.wait_before(0)
    lines: list[str] = []
    body = {"messages": HELLO, "stream": True}
    with httpx.stream("POST", impatient + CHAT, json=body, timeout=20) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": ") == 3:
                go.set()
    assert lines.count(": ") >= 3
    assert lines[-2] == "data: [DONE]"
    assert turns()[0].untrainable is None


def test_clients_do_not_see_what_keeps_them_alive(
    engine: MockEngine, impatient: str, turns: Turns
) -> None:
    engine.replies.append(Answer("At last, an answer."))
    go = engine.wait_before(2)
    threading.Timer(0.3, go.set).start()
    with openai.OpenAI(base_url=f"{impatient}/v1", api_key="tg-r1", max_retries=0) as client:
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "At last, an answer."
    assert len(turns()) == 1


def test_a_refusal_after_the_first_comment_is_sent_in_the_stream(
    engine: MockEngine, impatient: str, store: Store
) -> None:
    push = partial(httpx.post, headers=CONTROL, timeout=20)
    push(f"{impatient}/api/push/hold", json={})
    engine.failure = (429, {"error": {"message": "too many", "type": "x", "code": 429}}, {})
    threading.Timer(0.3, push, [f"{impatient}/api/push/release"]).start()
    with (
        openai.OpenAI(base_url=f"{impatient}/v1", api_key="tg-r1", max_retries=0) as client,
        pytest.raises(openai.APIError, match="too many"),
    ):
        list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert store.rollouts() == []


def test_a_quick_refusal_keeps_its_status_and_says_when_to_come_back(rig: ProxyWithEngine) -> None:
    rig.engine.failure = (429, {"error": {"message": "too many", "type": "x", "code": 429}}, {})
    answer = rig.http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    rig.engine.failure = (503, {"error": {"message": "busy"}}, {"retry-after": "7"})
    answer = rig.http.post(CHAT, json={"messages": HELLO})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


async def test_under_another_server_what_is_written_goes_out_when_it_is_drained() -> None:
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    with StreamedResponse({}, send, "text/plain", lambda: b"filler", 60) as line:
        await line.drain()
        assert sent == [], "nothing was said, so nothing is begun"
        assert line.write(b"one ")
        assert line.write(b"two")
        await line.drain()
        await line.send(b"end", last=True)
    assert [message.get("body") for message in sent] == [None, b"one two", b"end"]


async def test_a_line_that_speaks_is_not_filled() -> None:
    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("body", b""))

    with StreamedResponse({}, send, "text/plain", lambda: b"filler", 0.5) as line:
        for _ in range(12):
            await asyncio.sleep(0.05)
            await line.send(b"word")
        assert b"filler" not in sent
    with StreamedResponse({}, send, "text/plain", lambda: b"filler", 0.05) as line:
        await line.send(b"word")
        began = time.monotonic()
        await until(lambda: sent.count(b"filler") >= 2)
        fillers = sent.count(b"filler")
        assert fillers * 0.04 <= time.monotonic() - began, "timers may be a little early"
    await asyncio.sleep(0.15)
    assert sent.count(b"filler") == fillers, "silence after the end"


async def test_pieces_are_decoded_where_the_server_cannot_be_written_to_at_once() -> None:
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    with StreamedResponse({}, send, "text/plain", lambda: b"", 20) as response:
        assert response.write_frames(b"3\r\none\r\n4\r\n\r\ntw\r\n") is True
        assert response.write_frames(b"1\r\no\r\n") is True
        await response.drain()
    assert b"".join(sent) == b"one\r\ntwo"
