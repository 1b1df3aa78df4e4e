"""Who may do what: the guard in front of every route.

Without an admin key the proxy is open: it listens to this machine alone, and not to pages in its
browsers; `tg-<rollout>` as an API key names a rollout, and any other key is the engine's. With one,
a request brings the admin key, which may do everything, or a rollout's key (see `keys`), which may
call models and post events and spans, for its own rollout. Routes are denied to rollout keys unless
they are listed here, so that a new one is closed until somebody thinks about it.

A key may come in any of the places where the vendors' clients put theirs.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar
from urllib.parse import parse_qsl

from fastapi import APIRouter, Path
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tracegrad.proxy.attribution import ID_PATTERN
from tracegrad.proxy.browsers import check_local
from tracegrad.proxy.errors import ApiError
from tracegrad.proxy.keys import KEY_PREFIX, Keys, digest, rollout_named_by
from tracegrad.proxy.limits import check_length, limited
from tracegrad.records import Fact, SpanEnded

OPEN_PATHS = frozenset({"/healthz"})

# Where a key may stand; the first that opens something counts. The last is the SDK's own, for
# agents inside a rollout whose client has no real key.
AUTHORIZATION = b"authorization"
SDK_HEADER = b"x-tracegrad-key"
_HEADERS = (AUTHORIZATION, b"x-api-key", b"x-goog-api-key", SDK_HEADER)
_QUERY = "key"
_ROLLOUT_HEADER = b"x-tracegrad-rollout"

_own_path = re.compile(r"/rollouts/([^/]+)(/.*)")
# For a rollout's key: models and spans, under its own path or none, and its own events.
_model_path = re.compile(r"/v1(?:beta|alpha)?/.*")
_EVENTS = ("POST", "/api/events")

F = TypeVar("F", bound=Fact)
RolloutId = Annotated[str, Path(pattern=ID_PATTERN)]

_HOW = "send it as 'Authorization: Bearer <key>', x-api-key or x-goog-api-key"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    `rollout_id` is the rollout that its key names. `bound`: it may act for that one alone.
    `forward` is the Authorization that goes on to the engine; never a key of ours.
    """

    rollout_id: str | None = None
    bound: bool = False
    forward: str | None = None


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


def owned(facts: Sequence[F], caller: Caller) -> Sequence[F]:
    """The facts as the caller may post them: spans that name no rollout are its own.

    Raises ApiError (403) when one belongs to another rollout than the caller's.
    """
    if not caller.bound:
        return facts
    mine: list[F] = []
    for fact in facts:
        if isinstance(fact, SpanEnded) and fact.rollout_id is None:
            fact = replace(fact, rollout_id=caller.rollout_id)
        _check_rollout(caller, fact.rollout_id)
        mine.append(fact)
    return mine


class Access:
    """Tells callers apart by the keys that they bring."""

    def __init__(self, admin_key: str | None, keys: Keys) -> None:
        self._admin = digest(admin_key) if admin_key is not None else None
        self._keys = keys

    async def caller(self, headers: Sequence[tuple[bytes, bytes]], query: bytes) -> Caller:
        """Raises ApiError: 401 when a key is needed and none of those given is one."""
        found = _presented(headers, query)
        if self._admin is None:
            check_local(headers)
            return _in_the_open(found)
        for each in found:
            if hmac.compare_digest(digest(each.key), self._admin):
                return Caller()
            if (owner := await self._keys.owner(each.key)) is not None:
                return Caller(owner, bound=True)
        raise _unauthorized(given=bool(found))

    async def mint(self, rollout_id: str) -> str:
        """A key for the rollout; where the proxy is open, one that only names it."""
        if self._admin is None:
            return KEY_PREFIX + rollout_id
        return await self._keys.mint(rollout_id)

    async def revoke(self, rollout_id: str) -> None:
        await self._keys.revoke(rollout_id)


class Guard:
    """ASGI middleware: nobody gets past it without the right to, or with too large a body.

    `shape` gives the body of an error for a path, in the words of the dialect that is spoken
    there.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        max_body_bytes: int,
        shape: Callable[[str, ApiError], bytes],
    ) -> None:
        self._app = app
        self._access = access
        self._max_body_bytes = max_body_bytes
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope["tracegrad.caller"] = await self._admitted(scope)
                known = check_length(scope["headers"], self._max_body_bytes)
            except ApiError as error:
                response = self._refusal(scope["path"], error)
                await response(scope, receive, send)
                return
            if not known:
                receive = limited(receive, self._max_body_bytes)
        await self._app(scope, receive, send)

    async def _admitted(self, scope: Scope) -> Caller:
        path = scope["path"]
        if path in OPEN_PATHS:
            return Caller()
        caller = await self._access.caller(scope["headers"], scope["query_string"])
        if caller.bound:
            _check_place(caller, scope["method"], path, scope["headers"])
        return caller

    def _refusal(self, path: str, error: ApiError) -> Response:
        response = error.response(self._shape(path, error))
        if error.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        return response


class MintedKey(BaseModel):
    key: str


def make_keys_router(access: Access) -> APIRouter:
    """For whoever has the admin key: the guard keeps everybody else from these routes."""
    router = APIRouter(prefix="/api/rollouts/{rollout_id}/keys")

    @router.post("", status_code=201, summary="A key for one rollout")
    async def mint(rollout_id: RolloutId) -> MintedKey:
        """It may call models and post events and spans for its rollout, and nothing else. Only
        its hash is kept: this answer is the one time that it is told."""
        return MintedKey(key=await access.mint(rollout_id))

    @router.delete("", status_code=204, summary="The rollout's keys open nothing any more")
    async def revoke(rollout_id: RolloutId) -> None:
        await access.revoke(rollout_id)

    return router


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
    if name == SDK_HEADER:
        return _Presented(value, None)
    if name != AUTHORIZATION:
        return _Presented(value, f"Bearer {value}")
    scheme, _, key = value.partition(" ")
    return _Presented(key.strip() if scheme.lower() == "bearer" else value, value)


def _in_the_open(found: Sequence[_Presented]) -> Caller:
    """Nobody is asked for a key: one of ours names a rollout, another one is the engine's."""
    rollout_id, forward = None, None
    for each in found:
        named = rollout_named_by(each.key)
        if named is None:
            forward = forward or each.forward
        else:
            rollout_id = rollout_id or named
    return Caller(rollout_id or None, forward=forward)


def _check_place(
    caller: Caller, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> None:
    """Raises ApiError (403) where a rollout's key does not reach."""
    rest = path
    if own := _own_path.fullmatch(path):
        _check_rollout(caller, own[1])
        rest = own[2]
    for name, value in headers:
        if name == _ROLLOUT_HEADER:
            _check_rollout(caller, value.decode("latin-1"))
    if _model_path.fullmatch(rest) is None and (method, path) != _EVENTS:
        raise ApiError(
            403,
            f"{method} {path} needs the admin key; this is the key of rollout"
            f" {caller.rollout_id}, which calls models (/v1/...) and posts events (/api/events)",
            kind="permission_error",
            code="admin_key_needed",
        )


def _check_rollout(caller: Caller, rollout_id: str | None) -> None:
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
