"""The gate of our proxy, as a weight push and a sleep drive it; of several behind one address, all
of their gates.

No torch here: the process that wakes vLLM when the trainer is gone (`wake_guard`) needs it too.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tracegrad.events import Json
from tracegrad.proxy.http.protocol import SHUTDOWN_S
from tracegrad_trainer.inference.control_routes import (
    LOOK_TIMEOUT_S,
    Peer,
    ProxyGoneError,
    PushError,
)

logger = logging.getLogger(__name__)

# A proxy that is told to end closes its port, and then finishes its calls for this long at most:
# what is pushed meanwhile it does not know of.
ENDS_S = SHUTDOWN_S + 1.0
_VERSION = "/api/push/version"


class ProxyControl:
    """Without `urls` there is no gate, and nothing is done.

    Of several proxies each is asked, side by side, and an error of one is an error of all. But for
    one that is gone: it serves nobody once it has ended (`ENDS_S`), and a push goes on without it
    as long as one is left. When it is there again it holds its calls, as every proxy does that
    starts before a trainer. So it must not be opened by a push that has told it no version: what a
    hold (or `has_another`, before it is told the version) has not reached is left out until the
    next.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | None,
        timeout_s: float,
        *,
        key: str | None,
        hold_ttl_s: float,
    ) -> None:
        """`key` is their control key, or their admin key; a hold that nobody renews opens by itself
        after `hold_ttl_s`."""
        urls = (urls,) if isinstance(urls, str) else tuple(urls or ())
        self.urls = urls
        self._proxies = tuple(Peer("the proxy", url, timeout_s, key) for url in urls)
        self._reached = self._proxies
        self._stale: tuple[Peer, ...] = ()  # those in which `has_another` found another version
        self._gone_at: dict[str, float] = {}  # by the monotonic clock
        self._threads = ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="proxies")
        self._hold_ttl_s = hold_ttl_s
        self._upstream: dict[str, str] = {}  # of one server alone
        self._model: dict[str, str] = {}  # of the candidate of that name alone

    @contextlib.contextmanager
    def only(self, upstream: str) -> Iterator[None]:
        """What is asked meanwhile is of that server alone."""
        self._upstream = {"upstream": upstream}
        try:
            yield
        finally:
            self._upstream = {}

    @contextlib.contextmanager
    def of_candidate(self, model: str) -> Iterator[None]:
        """Versions that are set meanwhile are of the candidate that has that name on all servers.
        All calls are held, for it stands still with the others."""
        self._model = {"model": model}
        try:
            yield
        finally:
            self._model = {}

    def hold(self, *, drain_s: float) -> None:
        """New calls wait; those that come in one piece have `drain_s` to finish. Again: renewed."""
        body: Json = {"ttl_s": self._hold_ttl_s, "drain_s": drain_s, **self._upstream}
        self._post("/api/push/hold", body, to=self._proxies)
        if self._await_ends():
            self._post("/api/push/hold", body)  # renewed

    def set_version(self, version: int) -> None:
        body: Json = {"version": version, **self._upstream, **self._model}
        self._post(_VERSION, body)

    def take_back(self, version: int) -> None:
        """As `set_version`, behind a push that failed. Of several, whoever cannot be told keeps its
        calls until its hold ends, or it is told again, and the engines go on for the others."""
        body: Json = {"version": version, **self._upstream, **self._model}
        _, errors = self._each(self._reached, lambda proxy: proxy.post(_VERSION, json=body))
        if errors and len(errors) == len(self._reached):
            raise next(iter(errors.values()))
        for url, error in errors.items():
            logger.warning("the proxy at %s is not told of version %d: %s", url, version, error)
        self._reached = tuple(proxy for proxy in self._reached if proxy.url not in errors)

    @contextlib.contextmanager
    def only_stale(self) -> Iterator[None]:
        """What is asked meanwhile is of those in which `has_another` found another version."""
        reached, self._reached = self._reached, self._stale
        try:
            yield
        finally:
            self._reached = reached

    def set_canary(self, share: float, **place: str) -> None:
        """That share of rollouts goes to the server (`upstream`), and no other; or gets the
        candidate by its name (`model`)."""
        self._post("/api/push/canary", {"share": share, **place})

    def end_canary(self) -> None:
        # Without effect? All servers have the same weights, and one that was started has none.
        with contextlib.suppress(PushError):
            self._post("/api/push/canary", {"share": 0})

    def has_another(self, version: int, *, of_upstreams: Mapping[str, int] | None = None) -> bool:
        """Whether calls wait, or are recorded as of another version: of a proxy that was started
        since the last push. `of_upstreams`: which servers, or which candidate by its name, have
        another one, and which. False of one that does not answer."""
        path = "/api/push" if of_upstreams is None else "/api/push/upstreams"
        states, errors = self._each(
            self._proxies, lambda proxy: proxy.get(path, timeout=LOOK_TIMEOUT_S)
        )
        self._reach(self._proxies, errors)
        apart = dict(of_upstreams or {})
        others = {url for url, state in states.items() if _is_another(state, version, apart)}
        self._stale = tuple(proxy for proxy in self._proxies if proxy.url in others)
        return bool(self._stale)

    def release(self) -> None:
        # Without effect? A hold opens by itself after its ttl.
        with contextlib.suppress(PushError):
            self._post("/api/push/release", self._upstream or None)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for proxy in self._proxies:
            proxy.close()

    def _post(self, path: str, body: Json | None, *, to: Sequence[Peer] | None = None) -> None:
        """To those that were reached last, or `to` others, which are reached then."""
        asked = self._reached if to is None else to
        request = {} if body is None else {"json": body}
        _, errors = self._each(asked, lambda proxy: proxy.post(path, **request))
        left = self._reach(asked, errors)
        for url, error in errors.items():
            if not (isinstance(error, ProxyGoneError) and left):
                raise self._named(url, error)

    def _each(
        self, proxies: Sequence[Peer], ask: Callable[[Peer], Any]
    ) -> tuple[dict[str, Any], dict[str, PushError]]:
        """Answers and errors, by URL. All have come to an end."""
        if len(proxies) == 1:
            outcomes = [_outcome(proxies[0], ask)]
        else:
            outcomes = list(self._threads.map(lambda proxy: _outcome(proxy, ask), proxies))
        of = {proxy.url: outcome for proxy, outcome in zip(proxies, outcomes, strict=True)}
        errors = {url: one for url, one in of.items() if isinstance(one, PushError)}
        return {url: one for url, one in of.items() if url not in errors}, errors

    def _await_ends(self) -> bool:
        """Until who is gone has ended, too: whether that took time."""
        left = ENDS_S - (time.monotonic() - max(self._gone_at.values(), default=-ENDS_S))
        if len(self._proxies) == 1 or left <= 0:
            return False
        time.sleep(left)
        return True

    def _named(self, url: str, error: PushError) -> PushError:
        return error if len(self._proxies) == 1 else PushError(f"{url}: {error}")

    def _reach(self, asked: Sequence[Peer], errors: Mapping[str, PushError]) -> Sequence[Peer]:
        """Those that were `asked`, but for who is gone; from now on, where one is left."""
        left = tuple(
            proxy for proxy in asked if not isinstance(errors.get(proxy.url), ProxyGoneError)
        )
        now = time.monotonic()
        for proxy in asked:
            if proxy in left:
                self._gone_at.pop(proxy.url, None)
            else:
                self._gone_at.setdefault(proxy.url, now)
        if not left:
            return left
        if len(self._proxies) > 1:
            for proxy in set(self._reached) - set(left):
                logger.warning("the proxy at %s is gone: weights are pushed without it", proxy.url)
            for proxy in set(left) - set(self._reached):
                logger.warning("the proxy at %s is there again", proxy.url)
        self._reached = left
        return left


def _outcome(proxy: Peer, ask: Callable[[Peer], Any]) -> Any:
    """The answer, or the error."""
    try:
        return ask(proxy)
    except PushError as error:
        return error


def _is_another(state: Mapping[str, Any], version: int, apart: Mapping[str, int]) -> bool:
    """Of a proxy in that `state`: as `has_another`, with the versions that are to be `apart`. An
    empty state says nothing."""
    if not state:
        return False
    said = {url: one["version"] for url, one in state.get("upstreams", {}).items()}
    if (model := state.get("canary", {}).get("model")) is not None:
        said[model] = state["canary"].get("version")
    differing = {place: other for place, other in said.items() if other != state.get("version")}
    is_ours = state.get("version") == version and differing == apart
    return state.get("held") is True or not is_ours
