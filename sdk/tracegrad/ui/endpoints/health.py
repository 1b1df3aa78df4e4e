"""Health, and the store's check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tracegrad.store.maintenance import DoctorReport
from tracegrad.ui.frame import Frame
from tracegrad.ui.pages import health
from tracegrad.ui.proxy_state import ProxyState

# What the proxy is like now; None: there is none.
FindsState = Callable[[], Awaitable[ProxyState | None]]


class HealthEndpoints:
    def __init__(self, frame: Frame, find_state: FindsState) -> None:
        self._frame = frame
        self._find_state = find_state
        self._doctor = health.DoctorDesk()

    def routes(self) -> list[Route]:
        return [
            self._frame.get("/health", self._show),
            self._frame.post("/health", self._examine),
        ]

    async def _show(self, request: Request) -> Response:
        return await self._page(request)

    async def _examine(self, request: Request, _: dict[str, str]) -> Response:
        report = await self._frame.run(self._doctor.examine, self._frame.store)
        return await self._page(request, report, busy=report is None)

    async def _page(
        self, request: Request, report: DoctorReport | None = None, *, busy: bool = False
    ) -> Response:
        values = await self._frame.run(
            health.health_values, self._frame.store, await self._find_state()
        )
        return await self._frame.page(
            request, "health.html", 409 if busy else 200, **values, report=report, busy=busy
        )
