"""HTTP to one proxy, with the standard library: one request, one answer, and what it means."""

from __future__ import annotations

# All that a background thread uses is imported here: a lock that it held on an unfinished import
# would never be released in a process forked meanwhile (hence no httpx, which imports as it goes).
import encodings.idna  # noqa: F401 (resolving a host name imports it)
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

from tracegrad.protocol import FEEDBACK_PATH
from tracegrad.urls import is_on_this_machine

_log = logging.getLogger("tracegrad")

REQUEST_TIMEOUT_S = 5.0
SILENCE_S = 300.0  # between two warnings about the same proxy

# The answers that stay the same however often the same body is sent.
_REFUSALS = frozenset({400, 403, 413, 422})
_KEY_FIX = "set TRACEGRAD_API_KEY to the admin key that it was started with"


class ProxyUnreachable(Exception):
    """The proxy did not take a request this time; a later attempt may succeed."""


class ProxyRefused(Exception):
    """The proxy will never take this body; the message is its reason."""


def post_json(
    url: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> bytes:
    """One request of somebody who waits for the answer; its body. `url` as of `Transport`.

    Raises:
        ProxyUnreachable: no answer, or one that says "later".
        ProxyRefused: a refusal; in the proxy's words.
        ValueError: TRACEGRAD_API_KEY cannot be sent.
    """
    sent = {"Content-Type": "application/json", **headers}
    return _answered(url, path, body, sent, timeout_s)


def get_json(url: str, path: str) -> bytes:
    """As `post_json`, of a request that changes nothing."""
    return _answered(url, path, None, {}, REQUEST_TIMEOUT_S)


def _answered(
    url: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
) -> bytes:
    sent = dict(headers)
    if (key := api_key()) is not None:
        sent["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url + path, body, sent)
    try:
        with _opener(url).open(request, timeout=timeout_s) as answer:
            found: bytes = answer.read()
        return found
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404 and path != FEEDBACK_PATH:  # there it is the response's
                raise ProxyRefused(
                    f"{url} has no {path}: it is no tracegrad proxy, or an older one; set"
                    " TRACEGRAD_URL to the proxy's address"
                ) from None
            if error.code < 500:
                raise ProxyRefused(_message(_reason(error))) from None
            raise ProxyUnreachable(f"it answers {error.code}: {_message(_reason(error))}") from None
    except urllib.error.URLError as error:
        raise ProxyUnreachable(str(error.reason)) from error
    except TimeoutError as error:
        raise ProxyUnreachable(
            f"it took the request and did not answer within {timeout_s:g} s; it may do what was"
            " asked all the same"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ProxyUnreachable(f"{type(error).__name__}: {error}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET that nobody reads: it is no answer."""

    def redirect_request(self, *args: object) -> None:
        return None


def _opener(url: str) -> urllib.request.OpenerDirector:
    if is_on_this_machine(url):
        # HTTP_PROXY is for the world outside, not for this machine.
        return urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(_NoRedirect)


def api_key() -> str | None:
    """The key in TRACEGRAD_API_KEY; None where there is none.

    Raises:
        ValueError: it cannot be sent.
    """
    key = os.environ.get("TRACEGRAD_API_KEY", "").strip()
    # http.client would name it in its own error, and that error may be logged.
    if not all("!" <= character <= "~" for character in key):
        raise ValueError("TRACEGRAD_API_KEY: it holds other characters than visible ASCII ones")
    return key or None


class Transport:
    """Posts to one proxy. Blocks for as long as the proxy does: for background threads alone.

    Args:
        url: the proxy's address, without a trailing slash.

    Attributes:
        answered: whether the proxy ever took a request of this process.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered = False
        self._opener = _opener(url)
        self._unreachable = False  # since the last request
        self._silent_until = 0.0

    def post(self, path: str, body: bytes, content_type: str) -> bytes:
        """Send one request and wait for the answer; its body.

        Raises:
            ProxyUnreachable: no answer, or one that says "later"; logged, once in five minutes.
            ProxyRefused: the proxy finds the body itself wrong.
        """
        try:
            answer = self._request(path, body, content_type)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in _REFUSALS:
                    raise ProxyRefused(f"{error.code} {_reason(error)}") from None
            fix = f": {_KEY_FIX}" if error.code == 401 else ""
            raise self._no_answer(f"it answers {error.code}{fix}") from None
        except urllib.error.URLError as error:
            raise self._no_answer(str(error.reason)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._no_answer(f"{type(error).__name__}: {error}") from error
        if self._unreachable:
            _log.info("the tracegrad proxy at %s answers again", self.url)
        self.answered, self._unreachable = True, False
        return answer

    def _request(self, path: str, body: bytes, content_type: str) -> bytes:
        headers = {"Content-Type": content_type}
        if (key := api_key()) is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, body, headers)
        with self._opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            found: bytes = answer.read()
        return found

    def _no_answer(self, reason: str) -> ProxyUnreachable:
        self._unreachable = True
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + SILENCE_S
            _log.warning(
                "cannot reach the tracegrad proxy at %s (%s): events wait until it answers. "
                "Start it with `tracegrad proxy`, or set TRACEGRAD_URL to where it is",
                self.url,
                reason,
            )
        return ProxyUnreachable(reason)


def _message(body: str) -> str:
    """Of an error as the proxy says it."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return "(its reason did not arrive)"
