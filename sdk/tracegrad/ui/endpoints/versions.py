"""Versions, and decisions about them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tracegrad.ui.frame import Frame
from tracegrad.ui.pages import versions


class VersionEndpoints:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def routes(self) -> list[Route]:
        return [
            self._frame.get("/versions", self._show),
            self._frame.post("/versions", self._decide),
        ]

    async def _show(self, request: Request) -> Response:
        before, chosen = (
            versions.read_version(name, request.query_params.get(name))
            for name in ("before", "version")
        )
        values = await self._frame.run(versions.versions_values, self._frame.store, before, chosen)
        return await self._frame.page(request, "versions.html", **values)

    async def _decide(self, request: Request, form: dict[str, str]) -> Response:
        try:
            number = await self._frame.run(
                versions.decide, self._frame.store, form, self._frame.who_acts
            )
        except ValueError as error:
            chosen = versions.read_version("version", request.query_params.get("version"))
            values = await self._frame.run(
                versions.versions_values, self._frame.store, None, chosen, str(error), form
            )
            return await self._frame.page(request, "versions.html", 400, **values)
        return RedirectResponse(f"{versions.PATH}#decision-{number}", 303)
