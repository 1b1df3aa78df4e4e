"""The list of rollouts, and one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tracegrad.store.errors import AmbiguousRollout, StoreUnavailable
from tracegrad.ui import live
from tracegrad.ui.frame import Endpoint, Frame
from tracegrad.ui.pages import rollout, rollouts, tokens
from tracegrad.ui.paging import read_number, whole_number

# Finds out how the tokens of the model that is served are read; None: that is not known.
FindsTokens = Callable[[], Awaitable[tokens.ReadTokens | None]]


class RolloutEndpoints:
    def __init__(self, frame: Frame, find_tokens: FindsTokens) -> None:
        self._frame = frame
        self._find_tokens = find_tokens

    def routes(self) -> list[Route]:
        one = "/rollouts/{rollout}"
        return [
            self._frame.get("/rollouts", self._list),
            self._frame.get("/rollouts/events", self._new),
            self._of_one(one, self._show),
            self._of_one(f"{one}/newer", partial(self._neighbour, newer=True)),
            self._of_one(f"{one}/older", partial(self._neighbour, newer=False)),
            self._of_one(f"{one}/turns/{{turn}}/tokens", self._turn_tokens),
        ]

    def _of_one(self, path: str, endpoint: Endpoint) -> Route:
        """Where the beginning of an id is several rollouts', these are listed."""

        async def answered(request: Request) -> Response:
            try:
                return await endpoint(request)
            except AmbiguousRollout:
                return await self._search(request, request.path_params["rollout"])

        return self._frame.get(path, answered)

    async def _list(self, request: Request) -> Response:
        sought = request.query_params.get("q", "").strip()
        if sought:
            return await self._search(request, sought)
        query = rollouts.read_query(request.query_params.multi_items())
        before = request.query_params.get("before")
        values = await self._frame.run(rollouts.list_values, self._frame.store, query, before)
        return await self._frame.page(
            request, "rollouts.html", 400 if query.error else 200, **values
        )

    async def _search(self, request: Request, sought: str) -> Response:
        """The rollouts whose ids begin so; of one alone its page."""
        found = await self._frame.run(rollouts.search, self._frame.store, sought)
        if len(found) == 1 or sought in found:
            rollout_id = sought if sought in found else found[0]
            return RedirectResponse(rollouts.path_of(rollout_id), 303)
        return await self._frame.page(request, "search.html", sought=sought, found=found)

    async def _new(self, request: Request) -> Response:
        query = rollouts.read_query(request.query_params.multi_items())
        count = partial(
            rollouts.count_new, self._frame.store, query, request.query_params.get("after")
        )
        try:
            new = await self._frame.run(count)
        except StoreUnavailable:
            return live.nothing()
        return live.event("new", str(new.count), slow=not new.complete)

    async def _show(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout"]
        turn = whole_number(request, "turn")
        query = rollouts.read_query(request.query_params.multi_items())

        def values() -> dict[str, Any]:
            first = rollout.page_of_turn(turn)
            return rollout.rollout_values(
                rollout.rollout_view(self._frame.store, rollout_id, first), query
            )

        return await self._frame.page(request, "rollout.html", **await self._frame.run(values))

    async def _neighbour(self, request: Request, *, newer: bool) -> Response:
        rollout_id = request.path_params["rollout"]
        query = rollouts.read_query(request.query_params.multi_items())
        path = await self._frame.run(
            rollouts.neighbour_path, self._frame.store, rollout_id, query, newer=newer
        )
        return RedirectResponse(path, 303)

    async def _turn_tokens(self, request: Request) -> Response:
        """A page, or with `part` what goes into one."""
        rollout_id = request.path_params["rollout"]
        turn = read_number("turn", request.path_params["turn"])
        first = whole_number(request, "from")
        read = await self._find_tokens()
        view = await self._frame.run(
            tokens.tokens_view, self._frame.store, rollout_id, turn, first, read
        )
        values = tokens.tokens_values(view, request.query_params.get("by", "probability"))
        template = "tokens_part.html" if "part" in request.query_params else "tokens.html"
        return await self._frame.page(
            request, template, path=rollouts.path_of(rollout_id), **values
        )
