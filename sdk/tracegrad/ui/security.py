"""Who may look and who may act: sessions, tokens in forms, and the headers of every page.

A proxy with an admin key asks for it once (`/ui/login`) and gives a cookie for it. The cookie
holds when it ends and a signature by the admin key, never the key: any worker, and any proxy with
the same key, can check it, and none has to remember it. The key itself, sent with a request, works
too.

A cookie is sent by the browser whoever made the request. So it opens /ui alone, other sites get it
sent with nothing (SameSite=Strict), and each form has a token that only a page of ours can read.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, unquote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tracegrad.key_derivation import sign_text

BASE = "/ui"
LOGIN = f"{BASE}/login"
STATIC = f"{BASE}/static/"
FEEDBACK_SCRIPT = f"{BASE}/feedback.js"

READING = frozenset({"GET", "HEAD"})

_SESSION_COOKIE = "tracegrad_session"
SESSION_S = 12 * 3600.0
# Where there is no session: the token of forms, given to this browser.
FORM_COOKIE = "tracegrad_form"
TOKEN_FIELD = "csrf"
# Of a request of the page, or of anybody without a key.
MOST_FORM_BYTES = 64 << 10

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Refused(Exception):
    """A request that is not let through, with what to do: the page says it. `status` is HTTP's."""

    def __init__(self, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.status = status


class Sessions:
    """Of a proxy with this admin key; None: it asks nobody for one, and there are none."""

    def __init__(self, admin_key: str | None) -> None:
        self._key = admin_key
        # Browsers send a host's cookies to all of its ports, where other proxies may listen.
        self.cookie = _SESSION_COOKIE
        if admin_key is not None:
            self.cookie += f"_{self._sign('cookie', '')[:8]}"

    @property
    def asks_for_key(self) -> bool:
        return self._key is not None

    def is_admin_key(self, given: str) -> bool:
        return self._key is not None and hmac.compare_digest(given.encode(), self._key.encode())

    def start(self) -> str:
        """A session's cookie: when it ends, something random, the signature of both."""
        text = f"{int(time.time() + SESSION_S)}.{secrets.token_hex(16)}"
        return f"{text}.{self._sign('session', text)}"

    def is_valid(self, cookie: str | None) -> bool:
        if self._key is None or cookie is None:
            return False
        text, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("session", text).encode()):
            return False
        return float(text.partition(".")[0]) > time.time()

    def is_open_to(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request brings a session of these."""
        sent = (value.decode("latin-1") for name, value in headers if name == b"cookie")
        return any(self.is_valid(cookie_parser(text).get(self.cookie)) for text in sent)

    def form_token(self, cookie: str) -> str:
        """What a form of this session has to bring."""
        return self._sign("form", cookie)

    def _sign(self, purpose: str, text: str) -> str:
        assert self._key is not None
        return sign_text(self._key, f"ui {purpose}", text)


def is_page(path: str) -> bool:
    """Whether a path is the web page's."""
    return path == BASE or path.startswith(f"{BASE}/")


def needs_no_key(method: str, path: str) -> bool:
    """What a browser asks for before anybody has logged in."""
    if method == "POST":
        return path == LOGIN
    return method in READING and (path in (LOGIN, FEEDBACK_SCRIPT) or path.startswith(STATIC))


def login_location(scope: Scope) -> str | None:
    """Where a person goes who is not logged in; None: this request is no person's."""
    if scope["method"] != "GET" or not (is_page(scope["path"]) or scope["path"] == "/"):
        return None
    if not any(name == b"accept" and b"text/html" in value for name, value in scope["headers"]):
        return None
    query = scope["query_string"].decode("latin-1")
    return f"{LOGIN}?next={quote(scope['path'] + ('?' + query if query else ''), safe='')}"


def local_path(given: str) -> str:
    """Where a form may lead on to: a page of ours and nowhere else."""
    path = unquote(given.partition("?")[0])  # to a browser, %2e%2e is ".."
    is_ours = is_page(path) and not {"\\", ".."} & {*path, *path.split("/")}
    is_ours = is_ours and given.isprintable()
    return given if is_ours else BASE


def is_secure(request: Request) -> bool:
    """Whether the browser's own connection is encrypted, as far as is known."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip()
    return "https" in (request.url.scheme, forwarded)


class FormTokens:
    """The token of forms: the session's, or without one a cookie's of this browser."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def of(self, request: Request) -> str:
        """For the forms of the page that answers this request."""
        cookie = request.cookies.get(self._sessions.cookie)
        if self._sessions.is_valid(cookie) and cookie is not None:
            return self._sessions.form_token(cookie)
        if not hasattr(request.state, "form_token"):
            request.state.form_token = request.cookies.get(FORM_COOKIE) or secrets.token_hex(16)
        return str(request.state.form_token)

    def remember(self, request: Request, response: Response) -> None:
        """Give the browser the token of the page that it gets."""
        token = getattr(request.state, "form_token", None)
        if token is not None:
            response.set_cookie(
                FORM_COOKIE,
                token,
                path=BASE,
                httponly=True,
                samesite="strict",
                secure=is_secure(request),
            )

    async def read(self, request: Request) -> dict[str, str]:
        """The fields of a form that a page of ours sent. Raises Refused."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused("another site sent this form; open the page itself and send it there")
        body = await request.body()
        if len(body) > MOST_FORM_BYTES:  # where no proxy has looked at it
            raise Refused("the form is larger than any of this page", 413)
        fields = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
        if not self._is_token(request, fields.get(TOKEN_FIELD, "")):
            raise Refused(
                "the form's token is not the one that this browser was given: reload the page"
                " and send it again (cookies must be allowed for this address)"
            )
        return fields

    def _is_token(self, request: Request, given: str) -> bool:
        cookie = request.cookies.get(self._sessions.cookie)
        if self._sessions.is_valid(cookie) and cookie is not None:
            right: str | None = self._sessions.form_token(cookie)
        else:
            right = request.cookies.get(FORM_COOKIE)
        return bool(right) and hmac.compare_digest(given.encode(), str(right).encode())


class PageHeaders:
    """ASGI middleware: every answer of the page has the headers that keep what agents wrote from
    being run."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-store"
            await send(message)

        await self._app(scope, receive, guarded)
