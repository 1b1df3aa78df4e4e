"""Many fast streams are read together; few or slow ones at once."""

from __future__ import annotations

import asyncio

from support.engines.raw_http_engine import RawHttpEngine, ReceivedRequest, ServerConnection
from support.proxy.upstream_pool import CHAT, JSON, Pool, until
from tracegrad.proxy.engine.upstreams import UpstreamPool
from tracegrad.proxy.engine.upstreams.read_moderation import ReadModeration
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate

STREAMS = 8


class Reader:
    def __init__(self) -> None:
        self.paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def moderated(streams: int) -> tuple[ReadModeration, list[Reader]]:
    moderation = ReadModeration()
    for _ in range(streams):
        moderation.join()
    return moderation, [Reader() for _ in range(streams)]


async def test_few_streams_never_rest() -> None:
    moderation, readers = moderated(3)
    for reader in readers:
        moderation.rest(reader)
        assert not reader.paused


async def test_many_rest_until_the_tick_that_they_share() -> None:
    moderation, readers = moderated(STREAMS)
    for _ in range(3):
        for reader in readers:
            moderation.rest(reader)
            assert reader.paused
        await until(lambda: not any(reader.paused for reader in readers))


async def test_who_leaves_is_read_on_at_once() -> None:
    moderation, readers = moderated(STREAMS)
    for reader in readers:
        moderation.rest(reader)
    moderation.leave(readers[0])
    assert [reader.paused for reader in readers] == [False] + [True] * (STREAMS - 1)
    for reader in readers[1:]:
        moderation.leave(reader)
    assert not any(reader.paused for reader in readers)


async def delivered(pool: UpstreamPool) -> list[bytes]:
    """What of a stream is handed on, read by read."""
    seen: list[bytes] = []

    def consume(data: bytes) -> bool:
        seen.append(data)
        return False

    async def never() -> None:
        raise AssertionError("nobody is behind")

    async with pool.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
        await answer.deliver(consume, never)
    return seen


async def test_pieces_that_come_fast_are_read_together(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    """And each of them comes: connections are given back as they were."""
    pieces = [b"%d," % number for number in range(200)]
    every = asyncio.Barrier(STREAMS)

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        await every.wait()
        for piece in pieces:
            await line.piece(piece)
            await asyncio.sleep(0)
        await line.end()

    engines[0].behave = behave
    mine = pool()
    for _ in range(2):
        found = await asyncio.gather(*(delivered(mine) for _ in range(STREAMS)))
        assert [b"".join(seen) for seen in found] == [b"".join(pieces)] * STREAMS
        assert max(map(len, found)) < len(pieces) / 2
    assert engines[0].open == STREAMS


async def test_a_piece_that_others_wait_for_comes_before_the_next(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    """Engines that say the next thing when the last was read get on."""
    taken: dict[bytes, asyncio.Event] = {}

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        for number in range(10):
            piece = b"%s-%d" % (asked.body, number)
            taken[piece] = asyncio.Event()
            await line.piece(piece)
            await taken[piece].wait()
        await line.end()

    async def never() -> None:
        raise AssertionError("nobody is behind")

    engines[0].behave = behave
    mine = pool()

    async def one(name: bytes) -> None:
        async with mine.request("POST", CHAT, body=name, headers=JSON) as answer:
            await answer.deliver(lambda data: taken[data].set() is not None, never)

    await asyncio.gather(*(one(b"%d" % number) for number in range(STREAMS)))
    assert len(taken) == 10 * STREAMS


async def test_a_mark_waits_for_tokens_that_rest_unread(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    """What the engine sent before a push is not of the weights that came with it."""
    for _ in range(6):
        await _push_behind_two_pieces(engines[0], pool())


async def _push_behind_two_pieces(engine: RawHttpEngine, pool: UpstreamPool) -> None:
    gate = WeightUpdateGate()
    lines: list[ServerConnection] = []
    seen: list[tuple[bytes, int]] = []
    over = asyncio.Event()

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        await line.piece(b"begins ")
        lines.append(line)
        await over.wait()
        await line.end()

    async def never() -> None:
        raise AssertionError("nobody is behind")

    async def one() -> None:
        async with (
            gate.admission(streaming=True) as admission,
            pool.request("POST", CHAT, body=b"{}", headers=JSON) as answer,
        ):

            def consume(data: bytes) -> bool:
                seen.append((data, admission.arrival_version()))
                return False

            await answer.deliver(consume, never)

    engine.behave = behave
    many = 2 * STREAMS
    streams = [asyncio.create_task(one()) for _ in range(many)]
    await until(lambda: len(seen) == many)
    await asyncio.sleep(0.02)  # none rests
    for line in lines:
        await line.piece(b"first ")
    while len(seen) < 2 * many:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for line in lines:  # into the sockets of streams that rest
        await line.piece(b"second")
    await gate.set_version(7)
    over.set()
    await asyncio.gather(*streams)
    assert b"".join(data for data, _ in seen).count(b"second") == many
    assert {version for data, version in seen if b"second" in data} == {0}
