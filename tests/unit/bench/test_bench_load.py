"""The load generator counts what happens, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import repeat

import orjson
import pytest
from bench.proxy.calls import Prompt
from bench.proxy.cells import Cell, requests
from bench.proxy.engine import Engine, Pace, serve
from bench.proxy.load import Load, Measured, Sample, measure, request
from bench.proxy.rounds import percentile

CHAT = "/v1/chat/completions"
EVENTS = 514  # role, 512 tokens, [DONE]


def ask(stream: bool) -> bytes:
    return request(CHAT, Prompt(200, 0).request(stream=stream))


def some(calls: int, *, stream: bool = False, concurrency: int = 1, limit_s: float = 20) -> Load:
    events = EVENTS if stream else 0
    asked = repeat(ask(stream), calls)
    return Load(asked, concurrency, issue_s=60, limit_s=limit_s, expected_events=events)


@asynccontextmanager
async def engine(pace: Pace | None = None) -> AsyncIterator[int]:
    mock = Engine()
    mock.pace = pace or Pace()
    server = await serve(mock, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


Answer = Callable[[asyncio.StreamWriter], None]


@asynccontextmanager
async def says(answer: Answer) -> AsyncIterator[int]:
    """A server that answers whatever it is asked with the same."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            answer(writer)

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def text(status: bytes, body: bytes) -> Answer:
    head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return lambda writer: writer.write(head + body)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_call_to_a_good_engine_is_a_good_sample(stream: bool) -> None:
    async with engine() as port:
        measured = await measure(port, some(12, stream=stream, concurrency=4))
    assert len(measured.good) == measured.calls == 12
    assert measured.errors == []
    assert measured.unfinished == 0
    for sample in measured.good:
        assert sample.first_s is not None
        assert 0 < sample.first_s <= sample.total_s
        assert sample.events == (EVENTS if stream else 0)


async def test_the_engine_keeps_the_pace_it_is_told() -> None:
    async with engine(Pace(answer_s=0.05, step_s=0.01, chunk_tokens=128)) as port:
        whole = await measure(port, some(1))
        stream = await measure(port, some(1, stream=True))
    assert whole.good[0].total_s >= 0.05
    assert stream.good[0].total_s >= 0.03
    assert stream.good[0].events == 6


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (b"503 Service Unavailable", b'{"content": "words"}', "status 503"),
        (b"200 OK", b'{"content": ""}', "an answer without words"),
        (b"200 OK", b'data: {"content":"words"}\n\n', "a stream without [DONE]"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(status: bytes, body: bytes, error: str) -> None:
    async with says(text(status, body)) as port:
        measured = await measure(port, some(2, stream=body.startswith(b"data:")))
    assert measured.errors == [error] * 2
    assert measured.calls == 0


async def test_a_connection_that_breaks_is_an_error_and_ends_its_caller() -> None:
    def hang_up(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        writer.close()

    async with says(hang_up) as port:
        measured = await measure(port, some(5))
    assert len(measured.errors) == 1
    assert measured.errors[0].startswith("connection lost")


async def test_what_is_not_http_is_an_error() -> None:
    async with says(lambda writer: writer.write(b"pardon?\r\n\r\n")) as port:
        measured = await measure(port, some(1))
    assert measured.errors[0].startswith("not HTTP")


async def test_calls_that_the_limit_cuts_short_count_by_what_had_come() -> None:
    half = b"".join(b'data: {"content":"words"}\n\n' for _ in range(EVENTS // 2))
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    data = head + b"%x\r\n%b\r\n" % (len(half), half)
    async with says(lambda writer: writer.write(data)) as port:
        measured = await measure(port, some(9, stream=True, concurrency=2, limit_s=0.3))
    assert measured.unfinished == 2
    assert measured.good == []
    assert measured.errors == []
    assert measured.calls == pytest.approx(1.0)


async def test_an_empty_line_cut_in_two_ends_one_event() -> None:
    async with engine() as port:

        async def bytewise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream_reader, upstream = await asyncio.open_connection(
                "127.0.0.1", port, limit=1 << 20
            )
            upstream.write(await reader.read(65536))
            data = await upstream_reader.readuntil(b"\r\n0\r\n\r\n")
            for at in range(0, len(data), 7):
                writer.write(data[at : at + 7])
                await writer.drain()
                if at % 49 == 0:
                    await asyncio.sleep(0)
            upstream.close()

        slow = await asyncio.start_server(bytewise, "127.0.0.1", 0)
        async with slow:
            measured = await measure(slow.sockets[0].getsockname()[1], some(1, stream=True))
    assert measured.errors == []
    assert measured.samples[0].events == EVENTS


def test_calls_a_second_are_good_ones_and_shares_of_those_cut_off() -> None:
    samples = [Sample(0.5), Sample(0.5), Sample(0.5, error="status 500"), Sample(share=0.5)]
    assert Measured(samples, wall_s=2.0).calls_per_s() == 1.25


def test_with_callers_that_ramp_up_calls_a_second_follow_from_how_long_they_take() -> None:
    samples = [Sample(2.0), Sample(3.0), Sample(9.0, error="status 500")]
    assert Measured(samples, wall_s=100.0).calls_per_s(ramped=10) == 4.0


async def test_a_server_that_is_not_there_is_an_error_of_each_caller() -> None:
    async with says(text(b"200 OK", b"")) as port:
        pass
    measured = await measure(port, some(9, concurrency=2))
    assert len(measured.samples) == 2
    assert all(error.startswith("cannot connect") for error in measured.errors)


def test_requests_change_their_prompt_each_time_and_their_rollout_now_and_then() -> None:
    asked = requests(200, stream=False)
    first = [next(asked).partition(b"\r\n\r\n") for _ in range(9)]
    assert len({body for _, _, body in first}) == 9
    assert len({head.rpartition(b": ")[2] for head, _, _ in first}) == 2
    assert orjson.loads(first[0][2])["max_tokens"] == 512


def test_an_engine_with_a_rate_takes_longer_for_more_callers() -> None:
    whole = Cell(False, 200, 32, rate=100)
    assert whole.pace == Pace(answer_s=0.24)
    assert whole.pause_s == pytest.approx(0.08)  # a call each 0.32 s
    assert Cell(True, 200, 256, rate=50).pace == Pace(step_s=0.01)
    assert Cell(True, 200, 256, rate=50, chunk_tokens=8).pace == Pace(step_s=0.08, chunk_tokens=8)
    assert Cell(True, 200, 32).pace == Pace()


def test_percentiles_are_milliseconds_that_occurred() -> None:
    assert percentile([0.003, 0.001, 0.002], 50) == 2.0
    assert percentile([0.001] * 19 + [1.0], 95) == 1000.0
    assert percentile([], 50) is None
