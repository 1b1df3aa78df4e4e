"""The page as an ASGI application, which the proxy mounts at /ui. What a path answers is in
`endpoints`, what a page shows in `pages`."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from tracegrad.store import Store
from tracegrad.ui.endpoints.feedback_script import feedback_script_route
from tracegrad.ui.endpoints.health import FindsState, HealthEndpoints
from tracegrad.ui.endpoints.login import LoginEndpoints
from tracegrad.ui.endpoints.rollouts import FindsTokens, RolloutEndpoints
from tracegrad.ui.endpoints.tasks import TaskEndpoints
from tracegrad.ui.endpoints.training import TrainingEndpoints
from tracegrad.ui.endpoints.versions import VersionEndpoints
from tracegrad.ui.environment import STATIC_FOLDER
from tracegrad.ui.frame import Frame
from tracegrad.ui.pages.rollouts import PATH
from tracegrad.ui.security import BASE, PageHeaders, Sessions


async def _unknown() -> None:
    return None


def make_ui(
    store: Store,
    *,
    sessions: Sessions,
    find_tokens: FindsTokens = _unknown,
    find_state: FindsState = _unknown,
) -> Starlette:
    """`sessions`: those of the proxy's admin key."""
    frame = Frame(store, sessions)
    return Starlette(
        routes=[
            frame.get("/", _home),
            *LoginEndpoints(frame).routes(),
            *RolloutEndpoints(frame, find_tokens).routes(),
            *TaskEndpoints(frame).routes(),
            *TrainingEndpoints(frame).routes(),
            *VersionEndpoints(frame).routes(),
            *HealthEndpoints(frame, find_state).routes(),
            feedback_script_route(),
            Mount("/static", _Static(directory=STATIC_FOLDER)),
            frame.get("/{rest:path}", frame.missing),
        ],
        middleware=[Middleware(PageHeaders)],
    )


def ui_routes(page: Starlette) -> list[BaseRoute]:
    """The page at /ui. A mount alone does not match its own path: Starlette would send a browser on
    to the address as it knows it, which behind a proxy that ends TLS is http."""

    return [Route(BASE, _home, include_in_schema=False), Mount(BASE, page)]


async def _home(_: Request) -> Response:
    return RedirectResponse(PATH, 303)


class _Static(StaticFiles):
    """Links to these name a digest of what is in them."""

    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response
