"""The page as an ASGI application, which the proxy mounts at /ui: routes, and what they answer
where something is wrong. What a page shows is in `pages`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from jinja2 import Environment
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from tracegrad.proxy.store_async import run_in
from tracegrad.store import Store
from tracegrad.store.errors import (
    AmbiguousRollout,
    StoreCorrupt,
    StoreUnavailable,
    UnknownRollout,
)
from tracegrad.ui import live
from tracegrad.ui.environment import STATIC_FOLDER, make_environment, render
from tracegrad.ui.pages import rollout, rollouts, task, tasks, tokens
from tracegrad.ui.paging import WrongLink
from tracegrad.ui.security import (
    BASE,
    LOGIN,
    SESSION_S,
    FormTokens,
    PageHeaders,
    Refused,
    Sessions,
    is_secure,
    local_path,
)

log = logging.getLogger("tracegrad.proxy")

# Finds out how the tokens of the model that is served are read; None: that is not known.
FindsTokens = Callable[[], Awaitable[tokens.ReadTokens | None]]
Endpoint = Callable[[Request], Awaitable[Response]]
# Pages that are read and made at a time; others wait. Calls have threads of their own.
THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")


class NavigationLink(NamedTuple):
    """An entry of the bar on top. `path` is below BASE."""

    title: str
    path: str


NAVIGATION = (NavigationLink("Rollouts", "rollouts"), NavigationLink("Tasks", "tasks"))


async def _no_tokenizer() -> None:
    return None


def make_ui(
    store: Store, *, sessions: Sessions, find_tokens: FindsTokens = _no_tokenizer
) -> Starlette:
    """`store` is read and stays open. `sessions`: those of the proxy's admin key."""
    return Starlette(
        routes=Pages(store, sessions, find_tokens).routes(),
        middleware=[Middleware(PageHeaders)],
    )


def ui_routes(page: Starlette) -> list[BaseRoute]:
    """The page at /ui. A mount alone does not match its own path: Starlette would send a browser on
    to the address as it knows it, which behind a proxy that ends TLS is http."""

    return [Route(BASE, _home, include_in_schema=False), Mount(BASE, page)]


async def _home(_: Request) -> Response:
    return RedirectResponse(rollouts.PATH, 303)


class Pages:
    """The routes. Reads run in threads, as does the making of the page out of them."""

    def __init__(self, store: Store, sessions: Sessions, find_tokens: FindsTokens) -> None:
        self._store = store
        self._find_tokens = find_tokens
        self._sessions = sessions
        self._tokens = FormTokens(sessions)
        self._environment: Environment = make_environment()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tracegrad-page")

    def routes(self) -> list[BaseRoute]:
        def get(path: str, endpoint: Endpoint) -> Route:
            return Route(path, self._guarded(endpoint), methods=["GET"])

        def post(path: str, act: Callable[[Request, dict[str, str]], Awaitable[Response]]) -> Route:
            """Every form is checked before its endpoint sees it."""

            async def checked(request: Request) -> Response:
                return await act(request, await self._tokens.read(request))

            return Route(path, self._guarded(checked), methods=["POST"])

        return [
            get("/", _home),
            get("/login", self._login_form),
            post("/login", self._log_in),
            post("/logout", self._log_out),
            get("/session", self._session),
            get("/rollouts", self._rollouts),
            get("/rollouts/events", self._new_rollouts),
            get("/rollouts/{rollout}", self._rollout),
            get("/rollouts/{rollout}/newer", partial(self._neighbour, newer=True)),
            get("/rollouts/{rollout}/older", partial(self._neighbour, newer=False)),
            get("/rollouts/{rollout}/turns/{turn}/tokens", self._turn_tokens),
            get("/tasks", self._tasks),
            post("/tasks", self._decide),
            get("/tasks/{task_id:path}", self._task),
            Mount("/static", _Static(directory=STATIC_FOLDER)),
            get("/{rest:path}", self._missing),
        ]

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def answered(request: Request) -> Response:
            try:
                _refuse_nul(request)
                return await endpoint(request)
            except Refused as refused:
                return await self._problem(request, str(refused), refused.status)
            except (UnknownRollout, task.UnknownTask) as unknown:
                return await self._problem(request, str(unknown), 404)
            except AmbiguousRollout:
                return await self._search(request, request.path_params["rollout"])
            except StoreUnavailable as error:
                return await self._problem(request, f"the store cannot be read: {error}", 503)
            except WrongLink as error:
                return await self._problem(request, str(error), 400)
            except StoreCorrupt as error:
                log.exception("the page %s", request.url.path)
                message = f"what is stored is damaged: {error}; try tracegrad doctor"
                return await self._problem(request, message, 500)
            except Exception:
                log.exception("the page %s", request.url.path)
                message = "this page failed by an error of tracegrad's own: see the proxy's log"
                return await self._problem(request, message, 500)

        return answered

    async def _run(self, method: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """As `run_in_thread`, without a thread that calls could use."""
        return await run_in(self._threads, method, *args, **more)

    async def page(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """The page that a template makes; `values` are its own."""
        made = await self._run(
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
            "logged_in": self._sessions.is_valid(request.cookies.get(self._sessions.cookie)),
        }

    async def _problem(self, request: Request, message: str, status: int) -> Response:
        return await self.page(request, "problem.html", status, message=message, status_code=status)

    async def _missing(self, request: Request) -> Response:
        return await self._problem(request, f"there is no page {request.url.path}", 404)

    # Access

    async def _login_form(self, request: Request) -> Response:
        onward = local_path(request.query_params.get("next", BASE))
        if not self._sessions.asks_for_key:
            return RedirectResponse(onward, 303)
        return await self.page(request, "login.html", onward=onward, wrong=False)

    async def _log_in(self, request: Request, form: dict[str, str]) -> Response:
        onward = local_path(form.get("next", BASE))
        if not self._sessions.is_admin_key(form.get("key", "").strip()):
            return await self.page(request, "login.html", 401, onward=onward, wrong=True)
        response = RedirectResponse(onward, 303)
        response.set_cookie(
            self._sessions.cookie,
            self._sessions.start(),
            max_age=int(SESSION_S),
            path=BASE,
            httponly=True,
            samesite="strict",
            secure=is_secure(request),
        )
        return response

    async def _log_out(self, _: Request, __: dict[str, str]) -> Response:
        response = RedirectResponse(LOGIN, 303)
        response.delete_cookie(self._sessions.cookie, path=BASE, httponly=True, samesite="strict")
        return response

    async def _session(self, _: Request) -> Response:
        """For a page that another site's link led to: the browser withheld the session there."""
        return Response(status_code=204)

    # Rollouts

    async def _rollouts(self, request: Request) -> Response:
        sought = request.query_params.get("q", "").strip()
        if sought:
            return await self._search(request, sought)
        query = rollouts.read_query(request.query_params.multi_items())
        before = request.query_params.get("before")
        values = await self._run(rollouts.list_values, self._store, query, before)
        return await self.page(request, "rollouts.html", 400 if query.error else 200, **values)

    async def _search(self, request: Request, sought: str) -> Response:
        """The rollouts whose ids begin so; of one alone its page."""
        found = await self._run(rollouts.search, self._store, sought)
        if len(found) == 1 or sought in found:
            rollout_id = sought if sought in found else found[0]
            return RedirectResponse(rollouts.path_of(rollout_id), 303)
        return await self.page(request, "search.html", sought=sought, found=found)

    async def _new_rollouts(self, request: Request) -> Response:
        query = rollouts.read_query(request.query_params.multi_items())
        count = partial(rollouts.count_new, self._store, query, request.query_params.get("after"))
        try:
            new = await self._run(count)
        except StoreUnavailable:
            return live.nothing()
        return live.event("new", str(new.count), slow=not new.complete)

    # One rollout

    async def _rollout(self, request: Request) -> Response:
        rollout_id = request.path_params["rollout"]
        turn = _whole_number(request, "turn")
        query = rollouts.read_query(request.query_params.multi_items())

        def values() -> dict[str, Any]:
            first = rollout.page_of_turn(turn)
            return rollout.rollout_values(
                rollout.rollout_view(self._store, rollout_id, first), query
            )

        return await self.page(request, "rollout.html", **await self._run(values))

    async def _neighbour(self, request: Request, *, newer: bool) -> Response:
        rollout_id = request.path_params["rollout"]
        query = rollouts.read_query(request.query_params.multi_items())
        path = await self._run(rollouts.neighbour_path, self._store, rollout_id, query, newer=newer)
        return RedirectResponse(path, 303)

    async def _turn_tokens(self, request: Request) -> Response:
        """A page, or with `part` what goes into one."""
        rollout_id = request.path_params["rollout"]
        turn = _read_number("turn", request.path_params["turn"])
        first = _whole_number(request, "from")
        read = await self._find_tokens()
        view = await self._run(tokens.tokens_view, self._store, rollout_id, turn, first, read)
        values = tokens.tokens_values(view, request.query_params.get("by", "probability"))
        template = "tokens_part.html" if "part" in request.query_params else "tokens.html"
        return await self.page(request, template, path=rollouts.path_of(rollout_id), **values)

    # Tasks

    async def _tasks(self, request: Request) -> Response:
        sought = request.query_params.get("task", "")
        if sought:
            path = tasks.path_of(sought)
            if path.startswith(f"{tasks.PATH}/"):
                return RedirectResponse(path, 303)
            return await self._task_page(request, sought)
        before = request.query_params.get("before")
        values = await self._run(tasks.list_values, self._store, before)
        return await self.page(request, "tasks.html", **values)

    async def _task(self, request: Request) -> Response:
        task_id = request.path_params["task_id"]
        if not task_id:
            return RedirectResponse(tasks.PATH, 303)
        return await self._task_page(request, task_id)

    async def _task_page(
        self, request: Request, task_id: str, *, error: str | None = None
    ) -> Response:
        """`error`: why what was decided about it does not hold."""
        query = request.query_params.multi_items()
        success = task.read_success(request.query_params.get("success"))
        compared = [value for name, value in query if name == "compare"]
        turn = _whole_number(request, "turn")
        view = await self._run(task.task_view, self._store, task_id, success, compared, turn)
        values = task.task_values(view, success, query, error=error)
        return await self.page(request, "task.html", 400 if error else 200, **values)

    async def _decide(self, request: Request, form: dict[str, str]) -> Response:
        decision = tasks.read_decision(form, self._who_decides())
        try:
            return RedirectResponse(await self._run(tasks.record, self._store, decision), 303)
        except ValueError as error:
            said = str(error)
        if decision.subject == "task":
            try:
                return await self._task_page(request, decision.subject_id, error=said)
            except task.UnknownTask:
                pass  # the list says it
        values = await self._run(partial(tasks.list_values, self._store, None, error=said))
        return await self.page(request, "tasks.html", 400, **values)

    def _who_decides(self) -> str:
        """Sessions have no names: it was somebody with the admin key, or where there is none,
        somebody."""
        return "ui:admin_key" if self._sessions.asks_for_key else "ui"


def _whole_number(request: Request, name: str) -> int:
    """0 where the link has none. Raises WrongLink."""
    return _read_number(name, request.query_params.get(name, "0"))


def _read_number(name: str, text: str) -> int:
    if not (text.isdecimal() and len(text) <= 9):
        raise WrongLink(f"{name}: {text[:40]!r} is no whole number of at most 9 digits")
    return int(text)


def _refuse_nul(request: Request) -> None:
    """PostgreSQL has none in texts, and nothing of ours does. Raises WrongLink."""
    given = [*request.path_params.items(), *request.query_params.multi_items()]
    for name, value in given:
        if "\0" in name or "\0" in str(value):
            raise WrongLink(f"{name[:40]!r}: a NUL character; leave it out")


class _Static(StaticFiles):
    """Links to these name a digest of what is in them."""

    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response
