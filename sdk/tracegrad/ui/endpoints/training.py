"""The charts and steps of training, and one step."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tracegrad.store.errors import StoreUnavailable
from tracegrad.ui import live
from tracegrad.ui.frame import Frame
from tracegrad.ui.pages import step, training
from tracegrad.ui.pages.step_batch import read_place
from tracegrad.ui.paging import read_number, whole_number


class TrainingEndpoints:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def routes(self) -> list[Route]:
        return [
            self._frame.get("/training", self._show),
            self._frame.get("/training/series", self._series),
            self._frame.get("/training/events", self._new_steps),
            self._frame.get("/training/steps/{step}", self._step),
        ]

    async def _show(self, request: Request) -> Response:
        steps = training.read_steps(whole_number(request, "steps"))
        before = whole_number(request, "before") or None
        values = await self._frame.run(training.training_values, self._frame.store, steps, before)
        return await self._frame.page(request, "training.html", **values)

    async def _series(self, request: Request) -> Response:
        steps = training.read_steps(whole_number(request, "steps"))
        made = await self._frame.run(training.series_json, self._frame.store, steps)
        return Response(made, media_type="application/json")

    async def _new_steps(self, request: Request) -> Response:
        after = whole_number(request, "after")
        try:
            return live.event(
                "step", await self._frame.run(training.new_steps, self._frame.store, after)
            )
        except StoreUnavailable:
            return live.nothing()

    async def _step(self, request: Request) -> Response:
        number = read_number("step", request.path_params["step"])
        place = read_place(request.query_params)
        values = await self._frame.run(step.step_values, self._frame.store, number, place)
        if values is None:
            return await self._frame.problem(request, f"there is no step {number}", 404)
        return await self._frame.page(request, "step.html", **values)
