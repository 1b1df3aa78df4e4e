"""The way out: facts leave an agent's process in the background, in order, and none is lost.

An `Outbox` sends to one proxy from one thread. It never raises into the agent and never waits
for the proxy on the agent's time. What cannot be delivered ends in a file beside the process,
`.tracegrad/undelivered-<pid>.jsonl`, one event a line; `python -m tracegrad.resend FILE` sends
it later. Sending twice does no harm: every fact carries an id of its own.
"""

from __future__ import annotations

# All that the thread below uses is imported here: a lock that it held on an unfinished import
# would never be released in a process forked meanwhile (hence no httpx, which imports as it goes).
import atexit
import encodings.idna  # noqa: F401 (resolving a host name imports it)
import http.client
import json
import logging
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tracegrad.records import Fact, RewardGiven

_log = logging.getLogger("tracegrad")

EVENTS_PER_REQUEST = 256
FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0
REQUEST_TIMEOUT_S = 5.0
EXIT_PATIENCE_S = 10.0
# For a proxy that never answered this process: most likely there is none.
EXIT_PATIENCE_UNSEEN_S = 1.0

SILENCE_S = 300.0  # between two warnings about the same proxy

# The answers that stay the same however often the same body is sent.
_REFUSALS = frozenset({400, 403, 413, 422})
_KEY_MENDS = {
    401: "set TRACEGRAD_API_KEY to the admin key that it was started with",
    403: "TRACEGRAD_API_KEY is the key of one rollout, and opening others needs the admin key",
    404: "TRACEGRAD_URL leads to a server that makes no keys",
}


class Unreachable(Exception):
    """The proxy did not take a request this time; a later attempt may succeed."""


class Refused(Exception):
    """The proxy will never take this body; the message is its reason."""


class NoKey(RuntimeError):
    """The proxy makes no key for a rollout; the message says why, and what mends it."""


def as_event(fact: Fact) -> dict[str, Any]:
    """A fact as `POST /api/events` takes it: its fields and a `type`, such as "rollout_opened"."""
    name = "reward" if isinstance(fact, RewardGiven) else _snake_case(type(fact).__name__)
    return {"type": name, **{field.name: getattr(fact, field.name) for field in fields(fact)}}


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET that nobody reads: it is no answer."""

    def redirect_request(self, *args: object) -> None:
        return None


def _opener(url: str) -> urllib.request.OpenerDirector:
    host = urlsplit(url).hostname or ""
    if host in ("localhost", "::1") or host.startswith("127."):
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


def _encode(value: object) -> bytes:
    text = json.dumps(value, default=repr, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")  # an agent's text may hold lone surrogates


class Outbox:
    """A bounded, ordered queue of facts on their way to one proxy.

    Args:
        url: the proxy's address, without a trailing slash.
        capacity: how many facts may wait; those beyond it go straight to the file.
        folder: where the file of undelivered events is made.
    """

    def __init__(
        self, url: str, *, capacity: int = 10_000, folder: str | Path = ".tracegrad"
    ) -> None:
        self.url = url
        # What still holds data for this proxy; each is called before a flush.
        self.feeders: list[Callable[[], object]] = []
        self._capacity = capacity
        self._folder = Path(folder).absolute()  # now: the agent may change its directory
        self._opener = _opener(url)
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Also a forked child's beginning: its parent's thread, sockets and queue are not its."""
        self._changed = threading.Condition()
        self._nudge = threading.Event()  # cuts the pause before a retry short
        self._pending: deque[Fact] = deque()
        self._queued = self._done = 0  # counts of all facts so far
        self._thread: threading.Thread | None = None
        self._closed = False
        self._answered = False
        self.unreachable = False  # since the last request
        self._silent_until = 0.0
        self._set_aside_before = False

    def put(self, fact: Fact) -> None:
        """Queue a fact. Returns at once and never raises."""
        with self._changed:
            if not self._closed and len(self._pending) < self._capacity:
                self._pending.append(fact)
                self._queued += 1
                if self._thread is None:
                    self._start_thread()
                self._changed.notify_all()
                return
        self._set_aside([fact], "too many wait" if not self._closed else "the process ends")

    def flush(self, timeout: float = EXIT_PATIENCE_S) -> bool:
        """Wait until everything queued so far is delivered; False if that took too long.

        Args:
            timeout: seconds to wait at most.
        """
        for feed in self.feeders:
            feed()
        self._nudge.set()
        with self._changed:
            mine = self._queued
            return self._changed.wait_for(lambda: self._done >= mine, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flush, then write what is left to the file. Facts put later go to the file too.

        Args:
            timeout: seconds to wait at most; None waits ten for a proxy that has answered
                before, and one for a proxy that never has.
        """
        if timeout is None:
            timeout = EXIT_PATIENCE_S if self._answered else EXIT_PATIENCE_UNSEEN_S
        try:
            self.flush(timeout)
        finally:  # an impatient Ctrl-C must not lose them either
            with self._changed:
                self._closed = True
                rest = list(self._pending)
                self._pending.clear()
                self._done = self._queued
                self._changed.notify_all()
            self._nudge.set()
            self._set_aside(rest, f"the proxy at {self.url} does not take them")

    def post(self, path: str, body: bytes, content_type: str) -> None:
        """Send one request and wait for the answer.

        Raises:
            Unreachable: no answer, or one that says "later"; logged, at most every five minutes.
            Refused: the proxy finds the body itself wrong.
        """
        try:
            self._request(path, body, content_type)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in _REFUSALS:
                    raise Refused(
                        f"{error.code} {error.read(500).decode(errors='replace')}"
                    ) from None
            mend = f": {_KEY_MENDS[401]}" if error.code == 401 else ""
            raise self._no_answer(f"it answers {error.code}{mend}") from error
        except urllib.error.URLError as error:
            raise self._no_answer(str(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(f"{type(error).__name__}: {error}") from error
        if self.unreachable:
            _log.info("the tracegrad proxy at %s answers again", self.url)
        self._answered, self.unreachable = True, False

    def mint(self, rollout_id: str) -> str | None:
        """An API key for one rollout; None where TRACEGRAD_API_KEY is not set. Waits for it.

        Raises:
            NoKey: the proxy does not make one.
            ValueError: TRACEGRAD_API_KEY cannot be sent.
        """
        if api_key() is None:
            return None
        try:
            answer = self._request(f"/api/rollouts/{rollout_id}/keys", b"", "application/json")
            return str(json.loads(answer)["key"])
        except urllib.error.HTTPError as error:
            with error:
                reason = f"it answers {error.code}"
                if error.code in _KEY_MENDS:
                    reason += f": {_KEY_MENDS[error.code]}"
        except urllib.error.URLError as error:
            reason = f"{error.reason}: start it with `tracegrad proxy`, or set TRACEGRAD_URL"
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise NoKey(f"the tracegrad proxy at {self.url} makes no key for the rollout ({reason})")

    def _request(self, path: str, body: bytes, content_type: str) -> bytes:
        """The body of the answer. Raises what urllib raises."""
        headers = {"Content-Type": content_type}
        if (key := api_key()) is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, body, headers)
        with self._opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            content: bytes = answer.read()
        return content

    def _no_answer(self, reason: str) -> Unreachable:
        self.unreachable = True
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + SILENCE_S
            _log.warning(
                "cannot reach the tracegrad proxy at %s (%s): events wait until it answers. "
                "Start it with `tracegrad proxy`, or set TRACEGRAD_URL to where it is",
                self.url,
                reason,
            )
        return Unreachable(reason)

    def _start_thread(self) -> None:
        _close_at_exit()
        thread = threading.Thread(target=self._run, name="tracegrad-outbox", daemon=True)
        with suppress(RuntimeError):  # no thread to be had: closing writes them to the file
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
                batch = list(islice(self._pending, EVENTS_PER_REQUEST))
            self._nudge.clear()
            try:
                self._deliver(batch)
            except Unreachable:
                pause = min(2 * pause or FIRST_RETRY_S, LONGEST_RETRY_S)
                self._nudge.wait(pause)
                continue
            except Exception:
                _log.exception("tracegrad could not send %d events", len(batch))
                self._set_aside(batch, "they could not be sent")
            pause = 0.0
            with self._changed:
                if not self._closed:
                    for _ in batch:
                        self._pending.popleft()
                    self._done += len(batch)
                self._changed.notify_all()

    def _deliver(self, batch: Sequence[Fact]) -> None:
        """Send a batch; when the proxy refuses it, find the events that it refuses."""
        events = [as_event(fact) for fact in batch]
        try:
            self.post("/api/events", _encode({"events": events}), "application/json")
        except Refused as refusal:
            if len(batch) == 1:
                self._set_aside(batch, f"the proxy refuses them: {refusal}")
                return
            middle = len(batch) // 2
            self._deliver(batch[:middle])
            self._deliver(batch[middle:])

    def _set_aside(self, facts: Sequence[Fact], reason: str) -> None:
        if not facts:
            return
        path = self._folder / f"undelivered-{os.getpid()}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(b"".join(_encode(as_event(fact)) + b"\n" for fact in facts))
        except OSError as error:
            _log.error("%d tracegrad events are lost: %s (%s)", len(facts), reason, error)
            return
        if not self._set_aside_before:
            self._set_aside_before = True
            _log.warning(
                "tracegrad events are kept in %s (%s); send them later with "
                "`python -m tracegrad.resend %s`",
                path,
                reason,
                path,
            )


_outboxes: dict[str, Outbox] = {}
_outboxes_lock = threading.Lock()


def outbox(url: str) -> Outbox:
    """This process's outbox for the proxy at `url`."""
    with _outboxes_lock:
        if url not in _outboxes:
            _outboxes[url] = Outbox(url)
        return _outboxes[url]


def flush(timeout: float = EXIT_PATIENCE_S) -> bool:
    """Wait until all rollouts, rewards and spans so far have reached the proxy.

    Leaving the process does the same; call it where a process is killed rather than left (a
    worker of a pool, a notebook), or before reading the store.

    Args:
        timeout: seconds to wait at most.

    Returns:
        False if something is still on its way; it stays queued.
    """
    deadline = time.monotonic() + timeout
    delivered = True
    for box in [*_outboxes.values()]:
        delivered &= box.flush(max(0.0, deadline - time.monotonic()))
    return delivered


def _close_at_exit() -> None:
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    # A process of `multiprocessing` ends without atexit (before Python 3.14).
    if multiprocessing := sys.modules.get("multiprocessing.util"):
        multiprocessing.Finalize(None, _close_all, exitpriority=10)


def _close_all() -> None:
    for box in [*_outboxes.values()]:
        with suppress(KeyboardInterrupt):
            box.close()


def _after_fork_in_child() -> None:
    global _outboxes_lock
    _outboxes_lock = threading.Lock()
    for box in _outboxes.values():
        box._start_afresh()


os.register_at_fork(after_in_child=_after_fork_in_child)
