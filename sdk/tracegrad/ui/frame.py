"""What all pages have: the frame that templates fill, threads for what they read, and one answer to
each thing that can be wrong."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tracegrad.proxy.store_async import run_in
from tracegrad.store import Store
from tracegrad.store.errors import StoreCorrupt, StoreUnavailable, UnknownRollout
from tracegrad.ui.environment import make_environment, render
from tracegrad.ui.paging import NotThere, WrongLink
from tracegrad.ui.security import FormTokens, Refused, Sessions

log = logging.getLogger("tracegrad.proxy")

Endpoint = Callable[[Request], Awaitable[Response]]
# Pages that are read and made at a time; others wait. Calls have threads of their own.
THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")


class NavigationLink(NamedTuple):
    """An entry of the bar on top. `path` is below BASE."""

    title: str
    path: str


NAVIGATION = (
    NavigationLink("Rollouts", "rollouts"),
    NavigationLink("Tasks", "tasks"),
    NavigationLink("Training", "training"),
    NavigationLink("Versions", "versions"),
    NavigationLink("Health", "health"),
)


class Frame:
    """Reads run in threads, as does the making of the page out of them. `store` is read, decisions
    are written into it, and it stays open."""

    def __init__(self, store: Store, sessions: Sessions) -> None:
        self.store = store
        self.sessions = sessions
        # Sessions have no names: it was somebody with the admin key, or where there is none,
        # somebody.
        self.who_acts = "ui:admin_key" if sessions.asks_for_key else "ui"
        self._tokens = FormTokens(sessions)
        self._environment: Environment = make_environment()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tracegrad-page")

    def get(self, path: str, endpoint: Endpoint) -> Route:
        return Route(path, self._guarded(endpoint), methods=["GET"])

    def post(
        self, path: str, act: Callable[[Request, dict[str, str]], Awaitable[Response]]
    ) -> Route:
        """Every form is checked before its endpoint sees it."""

        async def checked(request: Request) -> Response:
            return await act(request, await self._tokens.read(request))

        return Route(path, self._guarded(checked), methods=["POST"])

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def answered(request: Request) -> Response:
            try:
                _refuse_nul(request)
                return await endpoint(request)
            except Refused as refused:
                return await self.problem(request, str(refused), refused.status)
            except (UnknownRollout, NotThere) as unknown:
                return await self.problem(request, str(unknown), 404)
            except StoreUnavailable as error:
                return await self.problem(request, f"the store cannot be read: {error}", 503)
            except WrongLink as error:
                return await self.problem(request, str(error), 400)
            except StoreCorrupt as error:
                log.exception("the page %s", request.url.path)
                message = f"what is stored is damaged: {error}; try tracegrad doctor"
                return await self.problem(request, message, 500)
            except Exception:
                log.exception("the page %s", request.url.path)
                message = "this page failed by an error of tracegrad's own: see the proxy's log"
                return await self.problem(request, message, 500)

        return answered

    async def run(self, method: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """As `run_in_thread`, without a thread that calls could use."""
        return await run_in(self._threads, method, *args, **more)

    async def page(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """The page that a template makes; `values` are its own."""
        made = await self.run(
            render, self._environment, template, **self._of_every_page(request), **values
        )
        response = HTMLResponse(made, status)
        self._tokens.remember(request, response)
        return response

    def _of_every_page(self, request: Request) -> dict[str, Any]:
        return {
            "navigation": NAVIGATION,
            "here": request.url.path,
            "csrf": self._tokens.of(request),
            "logged_in": self.sessions.is_valid(request.cookies.get(self.sessions.cookie)),
        }

    async def problem(self, request: Request, message: str, status: int) -> Response:
        return await self.page(request, "problem.html", status, message=message, status_code=status)

    async def missing(self, request: Request) -> Response:
        return await self.problem(request, f"there is no page {request.url.path}", 404)


def _refuse_nul(request: Request) -> None:
    """PostgreSQL has none in texts, and nothing of ours does. Raises WrongLink."""
    given = [*request.path_params.items(), *request.query_params.multi_items()]
    for name, value in given:
        if "\0" in name or "\0" in str(value):
            raise WrongLink(f"{name[:40]!r}: a NUL character; leave it out")
