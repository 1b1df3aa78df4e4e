"""What one client can take of a real proxy process: its memory, and the time of its event loop.

Memory is the process's peak, held against what docs/proxy.md says. Time is counted in answers to
others between the last byte of an attack and its own answer, so that it says the same on any
machine: of a loop that stands still there are none.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.engines.mock_engine import MODEL
from support.proxy.proxy_process import ProxyProcess
from support.proxy.raw_http import Answer, Reader, connect
from support.proxy.servers import serving

MIB = 1 << 20
BODY, BODIES = 8, 64  # MiB
MESSAGES = 40_000
# Besides the memory for bodies: the server's buffers, one body on its way to the engine and to the
# store, and what the allocator keeps.
SLACK = 96
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok"},
            "logprobs": {
                "content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
            },
            "finish_reason": "stop",
            "token_ids": [97],
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    "prompt_token_ids": [1, 2, 3],
}


async def engine(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """Says the same to everybody: its own prompt's tokens would be the attack otherwise."""
    while (await receive()).get("more_body"):
        pass
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": 200, "headers": [kind]})
    await send({"type": "http.response.body", "body": json.dumps(ANSWER).encode()})


class Attacked(ProxyProcess):
    def at_rest(self) -> int:
        """The memory that the process has, in bytes; its peak is told anew from here on."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        return self.peak()

    def peak(self) -> int:
        """The most memory that the process has had, in bytes."""
        told = Path(f"/proc/{self._pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", told)
        assert found is not None, told
        return int(found[1]) << 10


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    with pytest.MonkeyPatch.context() as patch, serving(engine, lifespan="off") as upstream:
        patch.setenv("TRACEGRAD_PROXY_MAX_BODY_MIB", str(BODY))
        patch.setenv("TRACEGRAD_PROXY_MAX_BODIES_MIB", str(BODIES))
        patch.delenv("TRACEGRAD_API_KEY", raising=False)
        proxy = Attacked(upstream, f"sqlite:///{folder}/store.db", folder / "proxy.log")
        proxy.start()
        yield proxy
        proxy.close()


class Others:
    """Somebody who asks for the proxy's health again and again: how often it was told."""

    def __init__(self, url: str) -> None:
        self.answers = 0
        self._url = url
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(30)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._done.is_set():
                assert client.get("/healthz").status_code == 200
                self.answers += 1


def head(path: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def sent(url: str, path: str, body: bytes, *headers: str) -> tuple[Answer, int]:
    """The answer, and how often others were answered while it was made."""
    with Others(url) as others, connect(url) as client:
        client.settimeout(120)
        client.sendall(head(path, len(body), *headers) + body)
        before = others.answers
        answer = Reader(client).answer()
        assert answer is not None
        return answer, others.answers - before


def chat(content: str) -> bytes:
    return f'{{"model":"{MODEL}","messages":[{content}]}}'.encode()


def length_delimited(tag: int, inner: bytes) -> bytes:
    length, coded = len(inner), b""
    while length >= 0x80:
        coded += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([tag]) + coded + bytes([length]) + inner


def span_of_attributes(count: int) -> bytes:
    data = b"\x0a\x10" + b"\1" * 16 + b"\x12\x08" + b"\1" * 8 + b"\x4a\x00" * count
    for tag in (0x12, 0x12, 0x0A):
        data = length_delimited(tag, data)
    return data


MESSAGE = '{"role":"user","content":"abc"}'
PACKED = ("content-encoding: gzip", "content-type: application/x-protobuf")
PACKED_JSON = ("content-encoding: gzip", "content-type: application/json")
# Path, body, headers: all of it too much.
TOO_MUCH: dict[str, Callable[[], tuple[str, bytes, tuple[str, ...]]]] = {
    "packed attributes": lambda: (
        "/v1/traces",
        gzip.compress(span_of_attributes(BODY * MIB // 2 - 100)),
        PACKED,
    ),
    "packed zeros": lambda: ("/v1/traces", gzip.compress(b"\0" * (200 * MIB)), PACKED),
    "packed lists": lambda: (
        "/v1/traces",
        gzip.compress(b'{"resourceSpans":[' + b"[]," * (BODY * MIB // 3 - 10) + b"[]]}"),
        PACKED_JSON,
    ),
    "messages": lambda: (
        "/v1/chat/completions",
        chat(",".join([MESSAGE] * (BODY * MIB // 32 - 10))),
        (),
    ),
    "objects": lambda: (
        "/v1/messages",
        b'{"messages":[' + b'{"a":0},' * (BODY * MIB // 8 - 10) + b"0]}",
        (),
    ),
    "events": lambda: (
        "/api/events",
        b'{"events":[' + b"{}," * (BODY * MIB // 3 - 10) + b"{}]}",
        ("content-type: application/json",),
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_too_much_is_refused_within_the_memory_for_bodies(
    proxy: Attacked, name: str
) -> None:
    path, body, headers = TOO_MUCH[name]()
    rest = proxy.at_rest()
    for _ in range(3):
        answer, _ = sent(proxy.url, path, body, *headers)
        assert answer.status == 413, answer.body
        assert b"max_" in answer.body, "it names the setting"
    assert proxy.peak() - rest < (BODIES + SLACK) * MIB


def test_a_large_body_does_not_stop_the_others(proxy: Attacked) -> None:
    """About as many messages as one client has memory for."""
    rest = proxy.at_rest()
    body = chat(",".join([MESSAGE] * MESSAGES))
    answer, others = sent(proxy.url, "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    assert others >= 10
    assert proxy.peak() - rest < (BODIES + SLACK) * MIB


def test_a_deep_body_does_not_stop_the_others(proxy: Attacked) -> None:
    """A part of a message is looked through for links: each value once, not once a level."""
    deep = "[" * 220 + ",".join(['""'] * 200_000) + "]" * 220
    body = chat(f'{{"role":"user","content":[{{"type":"newer","newer":{deep}}}]}}')
    answer, others = sent(proxy.url, "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    assert others >= 10


def test_bodies_that_are_nearly_there_have_their_bound_together(proxy: Attacked) -> None:
    """One address has half of the memory; more of its bodies are refused, others go on."""
    rest, size = proxy.at_rest(), BODY * MIB
    fit = BODIES // 2 // BODY
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(proxy.url)) for _ in range(3 * fit)]

        def nearly(client: socket.socket) -> None:
            client.settimeout(60)
            client.sendall(head("/v1/chat/completions", size))
            try:
                client.sendall(b" " * (size - 1))
            except OSError:
                assert client not in held

        held = clients[:fit]
        for client in held:
            nearly(client)
        with Others(proxy.url) as others, ThreadPoolExecutor(len(clients)) as pool:
            refusing = [pool.submit(nearly, client) for client in clients[fit:]]
            answers = [Reader(client).answer() for client in clients[fit:]]
            for each in refusing:
                each.result()
            assert others.answers > 10
        for answer in answers:
            assert answer is not None
            assert answer.status == 503
            assert b"max_bodies_mib" in answer.body
            assert answer.headers["retry-after"]
        assert proxy.peak() - rest < (BODIES + SLACK) * MIB
    small = httpx.post(f"{proxy.url}/v1/chat/completions", content=chat(MESSAGE), timeout=60)
    assert small.status_code == 200, "what hung up has given its memory back"
