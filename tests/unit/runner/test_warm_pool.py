"""The warm pool before sandboxes that only say what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxSpec, SandboxUnavailable
from tracegrad.runner.warm_pool import WarmPool

PLAIN = SandboxSpec(image="plain")
RESETTABLE = SandboxSpec(image="resettable", resettable=True)


class FakeSandbox:
    shares_files = False
    folder = "/"

    def __init__(self, spec: SandboxSpec) -> None:
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.spec = spec
        self.lives, self.resets, self.destroyed = True, 0, False

    def reachable(self, url: str) -> str:
        return url

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        environ: Mapping[str, str | None],
        timeout_s: float | None,
        output: Path,
        marker: str,
        echo: Callable[[bytes], object] | None = None,
    ) -> ProcessEnd:
        return ProcessEnd(0, 0.0)

    async def upload(self, source: Path, target: str) -> None: ...

    async def download(self, source: str, target: Path) -> None: ...

    async def alive(self) -> bool:
        return self.lives

    async def reset(self) -> None:
        self.resets += 1
        if not self.lives:
            raise SandboxUnavailable("it died")

    async def close(self) -> None:
        await (self.destroy() if self.on_close is None else self.on_close())

    async def destroy(self) -> None:
        self.destroyed = True


class FakeBackend:
    """`hold`: starts wait for it."""

    def __init__(self) -> None:
        self.made: list[FakeSandbox] = []
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None
        self.starting = self.most_starting = 0
        self.closed = False

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
            if self.error is not None:
                raise self.error
            self.made.append(FakeSandbox(spec))
            return self.made[-1]
        finally:
            self.starting -= 1

    async def close(self) -> None:
        self.closed = True


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what is waited for is a fake's own state)
            await asyncio.sleep(0)


async def test_a_ready_one_is_handed_out_and_replaced_while_it_is_used() -> None:
    backend = FakeBackend()
    pool = WarmPool(backend, size=1, total=1)
    first = await pool.start(PLAIN)
    await settled(lambda: pool.ready(PLAIN) == 1)
    backend.hold = asyncio.Event()  # another start would not come back
    second = await pool.start(PLAIN)
    assert [first, second] == backend.made
    await first.close()
    await second.close()
    await settled(lambda: backend.made[0].destroyed and backend.made[1].destroyed)
    backend.hold.set()
    await pool.close()
    assert backend.closed
    assert all(each.destroyed for each in backend.made)


async def test_a_crowd_is_served_in_turn_and_never_more_starts_than_the_size() -> None:
    backend = FakeBackend()
    pool = WarmPool(backend, size=3, total=3)
    found = await asyncio.gather(*(pool.start(PLAIN) for _ in range(20)))
    assert len({id(each) for each in found}) == 20
    assert backend.most_starting == 3
    await pool.close()


async def test_a_dead_one_is_not_handed_out() -> None:
    backend = FakeBackend()
    pool = WarmPool(backend, size=1, total=1)
    await pool.start(PLAIN)
    await settled(lambda: pool.ready(PLAIN) == 1)
    backend.made[1].lives = False
    assert await pool.start(PLAIN) is backend.made[2]
    await settled(lambda: backend.made[1].destroyed)
    await pool.close()


async def test_only_a_resettable_one_is_used_again() -> None:
    backend = FakeBackend()
    pool = WarmPool(backend, size=1, total=1)
    used = await pool.start(RESETTABLE)
    backend.hold = asyncio.Event()
    waiting = asyncio.create_task(pool.start(RESETTABLE))
    await asyncio.sleep(0)
    await used.close()
    assert await waiting is used
    assert backend.made[0].resets == 1
    assert not backend.made[0].destroyed
    backend.hold.set()
    await pool.close()


async def test_one_that_cannot_be_reset_goes() -> None:
    backend = FakeBackend()
    pool = WarmPool(backend, size=1, total=1)
    used = await pool.start(RESETTABLE)
    backend.made[0].lives = False
    await used.close()
    await settled(lambda: backend.made[0].destroyed)
    await pool.close()


@pytest.mark.parametrize("error", [BrokenEnvironment("no image"), SandboxUnavailable("no engine")])
async def test_who_waits_hears_why_there_is_none(error: Exception) -> None:
    backend = FakeBackend()
    pool = WarmPool(backend, size=1, total=1)
    backend.error = error
    with pytest.raises(type(error), match=str(error)):
        await pool.start(PLAIN)
    backend.error = None
    assert await pool.start(PLAIN) is backend.made[0]
    await pool.close()


async def test_who_gives_up_leaves_his_to_the_next() -> None:
    backend = FakeBackend()
    backend.hold = asyncio.Event()
    pool = WarmPool(backend, size=1, total=1)
    gives_up = asyncio.create_task(pool.start(PLAIN))
    await settled(lambda: backend.starting == 1)
    gives_up.cancel()
    await asyncio.gather(gives_up, return_exceptions=True)
    assert gives_up.cancelled()
    backend.hold.set()
    assert await pool.start(PLAIN) is backend.made[0]
    await pool.close()


async def test_its_end_refuses_who_waits_and_ends_what_still_starts() -> None:
    backend = FakeBackend()
    backend.hold = asyncio.Event()
    pool = WarmPool(backend, size=1, total=1)
    waiting = asyncio.create_task(pool.start(PLAIN))
    await settled(lambda: backend.starting == 1)
    closing = asyncio.create_task(pool.close())
    with pytest.raises(SandboxUnavailable, match="ends"):
        await waiting
    await closing  # an image may be built for it: nobody waits for that
    assert (backend.starting, backend.made) == (0, [])
    with pytest.raises(SandboxUnavailable, match="ends"):
        await pool.start(PLAIN)
