"""Logging in and out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tracegrad.ui.frame import Frame
from tracegrad.ui.security import BASE, LOGIN, SESSION_S, is_secure, local_path


class LoginEndpoints:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._sessions = frame.sessions

    def routes(self) -> list[Route]:
        return [
            self._frame.get("/login", self._login_form),
            self._frame.post("/login", self._log_in),
            self._frame.post("/logout", self._log_out),
            self._frame.get("/session", self._session),
        ]

    async def _login_form(self, request: Request) -> Response:
        onward = local_path(request.query_params.get("next", BASE))
        if not self._sessions.asks_for_key:
            return RedirectResponse(onward, 303)
        return await self._frame.page(request, "login.html", onward=onward, wrong=False)

    async def _log_in(self, request: Request, form: dict[str, str]) -> Response:
        onward = local_path(form.get("next", BASE))
        if not self._sessions.is_admin_key(form.get("key", "").strip()):
            return await self._frame.page(request, "login.html", 401, onward=onward, wrong=True)
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
