"""Tasks, one of them, and decisions about them."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tracegrad.ui.frame import Frame
from tracegrad.ui.pages import task, tasks
from tracegrad.ui.paging import whole_number


class TaskEndpoints:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def routes(self) -> list[Route]:
        return [
            self._frame.get("/tasks", self._list),
            self._frame.post("/tasks", self._decide),
            self._frame.get("/tasks/{task_id:path}", self._show),
        ]

    async def _list(self, request: Request) -> Response:
        sought = request.query_params.get("task")
        if sought:
            path = tasks.path_of(sought)
            if path.startswith(f"{tasks.PATH}/"):
                return RedirectResponse(path, 303)
        if sought is not None:
            try:
                return await self._page(request, sought)
            except task.UnknownTask:
                if sought:
                    raise  # else the form was sent as it was
        before = request.query_params.get("before")
        values = await self._frame.run(tasks.list_values, self._frame.store, before)
        return await self._frame.page(request, "tasks.html", **values)

    async def _show(self, request: Request) -> Response:
        task_id = request.path_params["task_id"]
        if not task_id:
            return RedirectResponse(tasks.PATH, 303)
        return await self._page(request, task_id)

    async def _page(self, request: Request, task_id: str, *, error: str | None = None) -> Response:
        """`error`: why what was decided about it does not hold."""
        query = request.query_params.multi_items()
        success = task.read_success(request.query_params.get("success"))
        compared = [value for name, value in query if name == "compare"]
        turn = whole_number(request, "turn")
        view = await self._frame.run(
            task.task_view, self._frame.store, task_id, success, compared, turn
        )
        values = task.task_values(view, success, query, error=error)
        return await self._frame.page(request, "task.html", 400 if error else 200, **values)

    async def _decide(self, request: Request, form: dict[str, str]) -> Response:
        decision = tasks.read_decision(form, self._frame.who_acts)
        try:
            return RedirectResponse(
                await self._frame.run(tasks.record, self._frame.store, decision), 303
            )
        except ValueError as error:
            said = str(error)
        if decision.subject == "task":
            try:
                return await self._page(request, decision.subject_id, error=said)
            except task.UnknownTask:
                pass  # the list says it
        values = await self._frame.run(
            partial(tasks.list_values, self._frame.store, None, error=said)
        )
        return await self._frame.page(request, "tasks.html", 400, **values)
