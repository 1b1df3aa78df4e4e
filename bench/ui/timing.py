"""Pages asked of the application in this process: what the server takes, without a network."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from starlette.applications import Starlette

from bench.ui.pages import AskedPage
from tracegrad.store import Store
from tracegrad.ui.app import make_ui, ui_routes
from tracegrad.ui.security import BASE, Sessions


@dataclass(slots=True)
class Timing:
    """`seconds`: from the request to the last byte, of each round. `cpu_s`: of the process then."""

    page: AskedPage
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    size: int = 0  # bytes of the answer

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def timed(store: Store, pages: Sequence[AskedPage], rounds: int) -> list[Timing]:
    """Each page in turn, `rounds` times, after a round that does not count."""
    return asyncio.run(_timed(store, pages, rounds))


async def _timed(store: Store, pages: Sequence[AskedPage], rounds: int) -> list[Timing]:
    app = Starlette(routes=ui_routes(make_ui(store, sessions=Sessions(None))))
    transport = httpx.ASGITransport(app)
    timings = [Timing(page) for page in pages]
    headers = {"accept": "text/html"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:4141", headers=headers
    ) as browser:
        for timing in timings:
            await _ask(browser, timing)
            timing.seconds.clear()
            timing.cpu_s.clear()
        for _ in range(rounds):
            for timing in timings:
                await _ask(browser, timing)
    return timings


async def _ask(browser: httpx.AsyncClient, timing: Timing) -> None:
    """Raises RuntimeError: it is no page."""
    began, cpu = time.perf_counter(), time.process_time()
    answer = await browser.get(f"{BASE}/{timing.page.path}")
    timing.seconds.append(time.perf_counter() - began)
    timing.cpu_s.append(time.process_time() - cpu)
    timing.size = len(answer.content)
    if answer.status_code not in timing.page.statuses:
        raise RuntimeError(f"{answer.request.url}: {answer.status_code}, {answer.text[:200]}")
