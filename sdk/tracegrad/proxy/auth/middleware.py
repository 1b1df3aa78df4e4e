"""Who may do what: the guard in front of every route.

Without an admin key the proxy is open: it listens to this machine alone, and not to pages in its
browsers; `tg-<rollout>` as an API key names a rollout, and any other key is the engine's. With one,
a request brings the admin key, which may do everything, or a rollout's key (see `rollout_keys`),
which may do what it was minted for, and for its own rollout. Routes are denied to rollout keys
unless they are listed here, so that a new one is closed until somebody thinks about it.

Whoever brings a rollout's key for calls is the agent that is scored: it calls models and sends
spans, and neither rewards nor ends nor scores are taken from it, in an open proxy either.

Weight pushes (`/api/push/...`) say which policy version tokens are, and hold everybody's calls:
they take the control key or the admin key, in the open too. The state of the gate (`/api/push`) is
for both as well: whoever pushes finds out by it that the proxy was started again.

`/metrics` names no rollout and no model, but counts: it takes the admin key, or a key of its own
that opens nothing else (`metrics_key`).

A key may come in any of the places where the vendors' clients put theirs. The web page (`/ui`)
takes the admin key, or the session that a person got for it (`tracegrad.ui.security`), which opens
nothing else; whoever is not logged in is led to its form.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar
from urllib.parse import parse_qsl

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tracegrad.events import Event, Span
from tracegrad.key_derivation import CALLS, EVENTS, SCOPES, KeyScope, derive_key, verify_derived_key
from tracegrad.protocol import (
    API_KEY_PREFIX,
    EVENTS_PATH,
    FEEDBACK_PATH,
    KEY_HEADER,
    METRICS_PATH,
    ROLLOUT_HEADER,
    TRACES_PATH,
)
from tracegrad.proxy.auth.origin_check import OriginCheck
from tracegrad.proxy.auth.rollout_keys import RolloutKeyService, hash_key, rollout_in_key
from tracegrad.proxy.http.errors import ApiError, BadRequest
from tracegrad.proxy.http.request import ClientDisconnected
from tracegrad.proxy.http.request_body import BodyReader
from tracegrad.ui.security import (
    MOST_FORM_BYTES,
    READING,
    Sessions,
    is_page,
    login_location,
    needs_no_key,
)

# To be read, without any key.
OPEN_PATHS = frozenset({"/healthz"})
_GATE, _PUSHES = "/api/push", "/api/push/"

# Where a key may stand; the first that opens something counts. The last is the SDK's own, for
# agents inside a rollout whose client has no real key.
AUTHORIZATION = b"authorization"
_KEY_HEADER = KEY_HEADER.encode()
_ROLLOUT_HEADER = ROLLOUT_HEADER.encode()
_HEADERS = (AUTHORIZATION, b"x-api-key", b"x-goog-api-key", _KEY_HEADER)
_QUERY = "key"

# What a key may consist of: it goes on in a header.
_sendable = re.compile(r"[^\x00-\x1f\x7f]+")
_own_path = re.compile(r"/rollouts/([^/]+)(/.*)")
# For a rollout's key: models and spans, under its own path or none, and its own events.
_model_path = re.compile(r"/v1(?:beta|alpha)?/.*")
_ALL = frozenset({CALLS, EVENTS})
_SCORING_PATHS = (EVENTS_PATH, FEEDBACK_PATH)

F = TypeVar("F", bound=Event)

_HOW = "send it as 'Authorization: Bearer <key>', x-api-key or x-goog-api-key"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    `rollout_id` is the rollout that its key names. `bound`: it may act for that one alone.
    `scopes`: what it may do there. `source`: who it is, as the rewards say that it gives.
    `admin`: it has the admin key. `forward` is the Authorization that goes on to the engine; never
    a key of ours.
    """

    rollout_id: str | None = None
    bound: bool = False
    scopes: frozenset[str] = _ALL
    source: str = "admin_key"
    admin: bool = False
    forward: str | None = None

    @property
    def may_reward(self) -> bool:
        """Whether its rewards and ends are believed."""
        return EVENTS in self.scopes


def caller_of(scope: Scope) -> Caller:
    """Behind the guard, who sends the request."""
    caller: Caller = scope["tracegrad.caller"]
    return caller


def engine_headers(caller: Caller) -> dict[str, str]:
    """The headers that a call has on its way to the engine."""
    sent = {"content-type": "application/json"}
    if caller.forward is not None:
        sent["authorization"] = caller.forward
    return sent


def restrict_to_rollout(events: Sequence[F], caller: Caller) -> Sequence[F]:
    """The events as the caller may post them: spans that name no rollout are its own.

    Raises ApiError (403) when one belongs to another rollout than the caller's, and its key is
    bound to that.
    """
    if caller.rollout_id is None:
        return events
    mine: list[F] = []
    for event in events:
        if isinstance(event, Span) and event.rollout_id is None:
            event = replace(event, rollout_id=caller.rollout_id)
        if caller.bound:
            check_rollout(caller, event.rollout_id)
        mine.append(event)
    return mine


class Authenticator:
    """Tells callers apart by the keys that they bring."""

    def __init__(
        self,
        admin_key: str | None,
        keys: RolloutKeyService,
        browsers: OriginCheck | None = None,
        *,
        control_key: str | None = None,
        metrics_key: str | None = None,
    ) -> None:
        self.sessions = Sessions(admin_key)
        self._admin_key = admin_key
        self._admin = hash_key(admin_key) if admin_key is not None else None
        self._control = hash_key(control_key) if control_key is not None else None
        self._metrics = hash_key(metrics_key) if metrics_key is not None else None
        self._keys = keys
        self._browsers = browsers or OriginCheck()

    async def authenticate(
        self, method: str, headers: Sequence[tuple[bytes, bytes]], query: bytes
    ) -> Caller:
        """Raises ApiError: 401 when a key is needed and none of those given is one, 403 for a
        page in a browser where none is, 400 for a key that cannot go on to the engine."""
        if self._admin is None:
            self._browsers.check(method, headers)
        found = _presented(headers, query)
        if not all(_sendable.fullmatch(each.key) for each in found):
            raise BadRequest(
                "the API key has control characters in it, which no header can carry", param="key"
            )
        if self._admin is None or self._admin_key is None:
            return _anonymous_caller(found)
        for each in found:
            if hmac.compare_digest(hash_key(each.key), self._admin):
                return Caller(admin=True)
            if (derived := verify_derived_key(each.key, self._admin_key)) is not None:
                await self._keys.add(derived[0], each.key, derived[1])
            if (granted := await self._keys.lookup(each.key)) is not None:
                return Caller(
                    granted.rollout_id, bound=True, scopes=granted.scopes, source="events_key"
                )
        raise _unauthorized(given=bool(found))

    def may_push(self, headers: Sequence[tuple[bytes, bytes]], query: bytes) -> bool:
        """Whether the control key or the admin key is among those given."""
        given = [hash_key(each.key) for each in _presented(headers, query)]
        known = [key for key in (self._control, self._admin) if key is not None]
        return any(hmac.compare_digest(one, key) for one in given for key in known)

    def may_read_metrics(self, headers: Sequence[tuple[bytes, bytes]], query: bytes) -> bool:
        """Whether the metrics key is among those given; the admin key opens them like all else."""
        if self._metrics is None:
            return False
        given = _presented(headers, query)
        return any(hmac.compare_digest(hash_key(each.key), self._metrics) for each in given)

    def push_refusal(self) -> ApiError:
        """What the refusal says."""
        if self._control is None:
            return ApiError(
                403,
                "weight pushes need a key, and this proxy has none: start it with"
                " TRACEGRAD_PROXY_CONTROL_KEY set (make one with: openssl rand -hex 32), and the"
                " trainer with the same; trainer serve does so by itself",
                kind="permission_error",
                code="control_key_needed",
            )
        return ApiError(
            401,
            f"weight pushes need this proxy's control key (TRACEGRAD_PROXY_CONTROL_KEY); {_HOW}",
            kind="authentication_error",
            code="control_key_needed",
        )

    async def mint(self, rollout_id: str, scopes: Sequence[KeyScope]) -> str | None:
        """A key for the rollout. Where the proxy is open, one that only names it; None for events,
        which are posted there without any."""
        if self._admin is None:
            return None if EVENTS in scopes else API_KEY_PREFIX + rollout_id
        return await self._keys.mint(rollout_id, scopes)

    async def revoke(self, rollout_id: str) -> None:
        if self._admin_key is not None:  # also the keys that the SDK derives, used yet or not
            for scope in SCOPES:
                key = derive_key(self._admin_key, rollout_id, scope)
                await self._keys.add(rollout_id, key, scope)
        await self._keys.revoke(rollout_id)


class AuthMiddleware:
    """ASGI middleware: nobody gets past it without the right to, or with too large a body.

    Behind it a request's body is there as a whole. `shape` gives the body of an error for a path,
    in the words of the dialect that is spoken there.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Authenticator,
        bodies: BodyReader,
        shape: Callable[[str, ApiError], bytes],
    ) -> None:
        self._app = app
        self._access = access
        self._bodies = bodies
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # none is served, to nobody
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lease = None
        scope["tracegrad.arrived_at"] = monotonic()
        try:
            scope["tracegrad.caller"] = caller = await self._admitted(scope)
            lease = scope["tracegrad.lease"] = self._bodies.lease(_client(caller, scope))
            most = _most_bytes(scope["path"])
            receive = await self._bodies.read(scope, receive, lease, most=most)
            await self._app(scope, receive, send)
        except ApiError as error:
            response = self._refusal(scope, error)
            await response(scope, receive, send)
        except ClientDisconnected:
            return
        finally:
            if lease is not None:
                lease.release()

    async def _admitted(self, scope: Scope) -> Caller:
        path = scope["path"]
        if path in OPEN_PATHS and scope["method"] in READING:
            return Caller()
        headers, pushes = scope["headers"], path.startswith(_PUSHES)
        of_gate = pushes or path == _GATE
        if of_gate and self._access.may_push(headers, scope["query_string"]):
            return Caller()
        if path == METRICS_PATH and self._access.may_read_metrics(headers, scope["query_string"]):
            return Caller()
        if is_page(path) and (visitor := self._visitor(scope)) is not None:
            return visitor
        caller = await self._access.authenticate(scope["method"], headers, scope["query_string"])
        if pushes and not caller.bound:
            raise self._access.push_refusal()
        if caller.bound or not caller.may_reward:
            _check_place(caller, scope["method"], path, headers)
        return caller

    def _visitor(self, scope: Scope) -> Caller | None:
        """Who looks at the page in a browser; None: they need a key, or none is asked for."""
        sessions = self._access.sessions
        if sessions.is_open_to(scope["headers"]):
            return Caller(admin=True)
        if sessions.asks_for_key and needs_no_key(scope["method"], scope["path"]):
            return Caller(scopes=frozenset(), source="nobody")
        return None

    def _refusal(self, scope: Scope, error: ApiError) -> Response:
        if error.status == 401 and (login := login_location(scope)) is not None:
            return RedirectResponse(login, 303)
        response = error.response(self._shape(scope["path"], error))
        if error.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        return response


def _most_bytes(path: str) -> int | None:
    """Of a body, where people without a key get: no stranger holds the memory of calls. None: as
    the settings say."""
    return MOST_FORM_BYTES if is_page(path) or path in OPEN_PATHS else None


def _client(caller: Caller, scope: Scope) -> str:
    """Whose share of the memory a body has: one key's or, where none is asked for, one
    address's."""
    if caller.admin:
        return "admin"
    if caller.bound:
        return f"rollout {caller.rollout_id}"
    return f"address {(scope.get('client') or ('',))[0]}"


@dataclass(frozen=True, slots=True)
class _Presented:
    """A key of a request's, and the Authorization that would say the same to the engine."""

    key: str
    forward: str | None


def _presented(headers: Iterable[tuple[bytes, bytes]], query: bytes) -> list[_Presented]:
    """The keys of a request, by the rank of their places."""
    found = [(name, value) for name, value in headers if name in _HEADERS]
    found.sort(key=lambda pair: _HEADERS.index(pair[0]))
    keys = [_in_header(name, value.decode("latin-1").strip()) for name, value in found]
    if b"key=" in query:
        pairs = parse_qsl(query.decode("latin-1"))
        keys += [_Presented(value, f"Bearer {value}") for name, value in pairs if name == _QUERY]
    return [each for each in keys if each.key]


def _in_header(name: bytes, value: str) -> _Presented:
    if name == _KEY_HEADER:
        return _Presented(value, None)
    if name != AUTHORIZATION:
        return _Presented(value, f"Bearer {value}")
    scheme, _, key = value.partition(" ")
    return _Presented(key.strip() if scheme.lower() == "bearer" else value, value)


def _anonymous_caller(found: Sequence[_Presented]) -> Caller:
    """Nobody is asked for a key: one of ours names a rollout, another one is the engine's."""
    rollout_id, forward, scopes = None, None, _ALL
    for each in found:
        named = rollout_in_key(each.key)
        if named is None:
            forward = forward or each.forward
        else:
            # A key that was given to an agent.
            rollout_id, scopes = rollout_id or named, frozenset({CALLS})
    return Caller(rollout_id or None, scopes=scopes, source="open", forward=forward)


def _check_place(
    caller: Caller, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> None:
    """Raises ApiError (403) where a rollout's key does not reach."""
    rest = path
    if own := _own_path.fullmatch(path):
        rest = own[2]
        if caller.bound:
            check_rollout(caller, own[1])
    for name, value in headers:
        if name == _ROLLOUT_HEADER and caller.bound:
            check_rollout(caller, value.decode("latin-1"))
    if not caller.scopes & _scopes_of(method, path, rest):
        raise _out_of_scope(caller, method, path)


def _scopes_of(method: str, path: str, rest: str) -> frozenset[str]:
    """Keys with one of these scopes get there; none: the admin key alone does. `rest`: the path
    below a rollout's own."""
    if method == "POST" and path in _SCORING_PATHS:
        return frozenset({EVENTS})
    if rest == TRACES_PATH:
        return _ALL
    return frozenset({CALLS}) if _model_path.fullmatch(rest) else frozenset()


def _out_of_scope(caller: Caller, method: str, path: str) -> ApiError:
    this = f"this is a key of rollout {caller.rollout_id} for {' and '.join(sorted(caller.scopes))}"
    if method != "POST" or path not in _SCORING_PATHS:
        code, message = "admin_key_needed", f"{method} {path} needs the admin key; {this}"
    else:
        code, fix = "events_key_needed", "post them without the agent's key"
        if caller.bound:
            fix = (
                "use the admin key, or one minted for events: POST /api/rollouts/<id>/keys with"
                ' {"scopes": ["events"]}'
            )
        message = f"{this}: who is scored gives neither rewards nor ends; {fix}"
    return ApiError(403, message, kind="permission_error", code=code)


def check_rollout(caller: Caller, rollout_id: str | None) -> None:
    """Raises ApiError (403) for another rollout than the caller's; its key is bound to that."""
    if rollout_id != caller.rollout_id:
        raise ApiError(
            403,
            f"this is the key of rollout {caller.rollout_id}; for rollout {str(rollout_id)[:128]}"
            f" use a key of its own (POST /api/rollouts/<id>/keys) or the admin key",
            kind="permission_error",
            code="other_rollout",
        )


def _unauthorized(*, given: bool) -> ApiError:
    what = (
        "the API key is not one of this proxy's: use its admin key (TRACEGRAD_API_KEY), or a key"
        " that it made for a rollout (POST /api/rollouts/<id>/keys) and has not revoked"
        if given
        else "an API key is needed here: the admin key (TRACEGRAD_API_KEY), or one that was made"
        " for a rollout (POST /api/rollouts/<id>/keys)"
    )
    return ApiError(401, f"{what}; {_HOW}", kind="authentication_error", code="invalid_api_key")
