"""Many fast streams are read together; few or slow ones at once."""

from __future__ import annotations

import asyncio

from support.engines.raw_http_engine import RawHttpEngine, ReceivedRequest, ServerConnection
from support.proxy.upstream_pool import CHAT, JSON, Pool, until
from tracegrad.proxy.engine.upstreams import UpstreamPool
from tracegrad.proxy.engine.upstreams.read_moderation import ReadModeration

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
