"""Attribution without touching the agent: HTTP clients name the rollout on calls to the proxy.

`install()` wraps the one method through which each client library sends every request, also of
those that are imported later. Outside a rollout, and for every other server, a wrapped method does
what it did before.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from types import ModuleType
from typing import Any

from tracegrad import context
from tracegrad.import_hook import ImportHook
from tracegrad.protocol import AGENT_HEADER, API_KEY_PREFIX, ROLLOUT_ATTRIBUTE, STATE_HEADER
from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger(__name__)


# Of what we add, what does not name the rollout.
_OF_ANY_ROLLOUT = ("traceparent", STATE_HEADER, AGENT_HEADER)


def install() -> None:
    """Wrap the HTTP libraries that are imported by now, and each other one where it is imported;
    those wrapped already stay as they are.

    Called whenever a rollout or a traced call begins: no library is imported for its sake, and one
    whose import by another thread had begun before the first call is found at a later one.
    """
    _on_import.install()
    for library, wrap in _WRAPPERS.items():
        if (module := sys.modules.get(library)) is not None:
            _safely(wrap, module)


def _wrap_httpx(module: Any) -> None:
    def wrap_sync(send: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            _safely(_sign, request.headers, str(request.url))
            return send(self, request, *args, **kwargs)

        return wrapped

    def wrap_async(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            _safely(_sign, request.headers, str(request.url))
            return await send(self, request, *args, **kwargs)

        return wrapped

    replace_method(module, "Client", "send", wrap_sync)
    replace_method(module, "AsyncClient", "send", wrap_async)


def _wrap_requests(module: Any) -> None:
    def wrap(send: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, request: Any, **kwargs: Any) -> Any:
            _safely(_sign, request.headers, request.url)
            return send(self, request, **kwargs)

        return wrapped

    replace_method(module, "Session", "send", wrap)


def _wrap_aiohttp(module: Any) -> None:
    def wrap(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(self: Any, method: str, str_or_url: Any, **kwargs: Any) -> Any:
            if context.current() is not None:
                _safely(_sign_aiohttp, self, str_or_url, kwargs)
            return await request(self, method, str_or_url, **kwargs)

        return wrapped

    replace_method(module, "ClientSession", "_request", wrap)


_WRAPPERS: dict[str, Callable[[Any], None]] = {
    "httpx": _wrap_httpx,
    "httpx2": _wrap_httpx,
    "requests": _wrap_requests,
    "aiohttp": _wrap_aiohttp,
}


def _wrap_safely(wrap: Callable[[Any], None]) -> Callable[[ModuleType], None]:
    return lambda module: _safely(wrap, module)


# The agent may import a library inside of its rollout.
_on_import = ImportHook({name: _wrap_safely(wrap) for name, wrap in _WRAPPERS.items()})


def replace_method(
    module: Any, class_name: str, method: str, wrap: Callable[[Any], Callable[..., Any]]
) -> None:
    """Once, however often it is asked for."""
    # A module that another thread is still importing has no such class yet: next time.
    owner = getattr(module, class_name, None)
    original = getattr(owner, method, None)
    if original is None or hasattr(original, "_tracegrad"):
        return
    # Two threads may both come here; wrapping twice does the same as wrapping once.
    wrapped: Any = functools.wraps(original)(wrap(original))
    wrapped._tracegrad = True
    setattr(owner, method, wrapped)


def _safely(sign: Callable[..., None], *args: Any) -> None:
    """An agent's call must not fail for the sake of its record; the proxy infers the rest."""
    try:
        sign(*args)
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        _log.warning("could not name the rollout on a call", exc_info=True)


def _sign(headers: MutableMapping[str, str], url: str) -> None:
    """Add what `context.attribution_headers` says, where the caller has not said it already."""
    ours = context.attribution_headers(url)
    # A key minted for a rollout was chosen on purpose, and a header would outrank it.
    if ours and _names_a_rollout(headers):
        ours = {name: ours[name] for name in _OF_ANY_ROLLOUT if name in ours}
    for name, value in ours.items():
        theirs = headers.get(name)
        if theirs is None:
            headers[name] = value
        elif name == "baggage" and ROLLOUT_ATTRIBUTE not in theirs:
            headers[name] = f"{theirs},{value}"


def _sign_aiohttp(session: Any, url: Any, kwargs: dict[str, Any]) -> None:
    # The session's own view of both: its base URL, and its headers under the request's.
    headers = session._prepare_headers(kwargs.get("headers"))
    _sign(headers, str(session._build_url(url)))
    kwargs["headers"] = headers


def _names_a_rollout(headers: MutableMapping[str, str]) -> bool:
    keys = (headers.get("authorization") or "", headers.get("x-api-key") or "")
    return any(key.removeprefix("Bearer ").startswith(API_KEY_PREFIX) for key in keys)
