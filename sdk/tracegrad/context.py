"""Where am I: which rollout the running code belongs to, and how an LLM call says so.

The answer lives in context variables, so every thread and every asyncio task has its own. A task
inherits it from the code that starts it; a bare thread does not: start it with
`contextvars.copy_context().run`, or give its client `rollout.base_url` or `rollout.api_key`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import SupportsFloat
from urllib.parse import urlsplit

from tracegrad.records import Fact, Outcome, RewardGiven, RolloutFinished, new_id

DEFAULT_URL = "http://127.0.0.1:4141"

# How a request names its rollout (a header, a W3C baggage key), and a span (an attribute).
ROLLOUT_HEADER = "x-tracegrad-rollout"
KEY_HEADER = "x-tracegrad-key"
ROLLOUT_KEY = "tracegrad.rollout"
API_KEY_PREFIX = "tg-"


class Rollout:
    """One attempt at one task. `tracegrad.rollout()` and `@trace` open and finish it.

    Attributes:
        id: the rollout's id, 32 hex characters.
        task_id: the group that it is compared within, if it has one.
        url: the proxy that records it, without a trailing slash.
    """

    def __init__(
        self,
        *,
        task_id: str | None,
        url: str,
        emit: Callable[[Fact], None],
        mint: Callable[[str], str | None],
    ) -> None:
        """`mint` makes a key for the rollout of an id; None where the proxy asks for none."""
        self.id = new_id()
        self.minted_key = mint(self.id)
        self.task_id = task_id
        self.url = url
        self.rewarded = False  # whether its own reward (not a turn's, not another name) was given
        self._finished = False
        self._emit = emit

    def __repr__(self) -> str:
        return f"Rollout(id={self.id!r}, task_id={self.task_id!r})"

    @property
    def base_url(self) -> str:
        """The OpenAI base URL whose calls belong to this rollout, from any process."""
        return f"{self.url}/rollouts/{self.id}/v1"

    @property
    def api_key(self) -> str:
        """An API key for this rollout and no other, for agents in processes of their own.

        Where TRACEGRAD_API_KEY is not set it is no secret, and only names the rollout. Where it
        is, leave that one out of their environment: it opens every rollout.
        """
        return self.minted_key or f"{API_KEY_PREFIX}{self.id}"

    def reward(
        self, value: SupportsFloat, *, turn: int | None = None, name: str = "reward"
    ) -> None:
        """Give the rollout, or one of its turns, a reward.

        Rewards are events: they may come late, after the rollout finished, and a later one of
        the same `name` and `turn` revises an earlier one.

        Args:
            value: a finite number; a bool counts as 0 or 1.
            turn: which turn, counted from 0, or from the end if negative; None for the rollout.
            name: which reward, when there are several; training uses the one named "reward".

        Raises:
            ValueError: `value` is not a finite number, `turn` no integer, or `name` empty.
        """
        number = _finite(value)
        if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int)):
            raise ValueError(f"turn: expected an integer such as 0 or -1, got {turn!r}")
        if not isinstance(name, str) or not name:
            raise ValueError(f"name: expected a non-empty string, got {name!r}")
        if turn is None and name == "reward":
            self.rewarded = True
        self._emit(RewardGiven(rollout_id=self.id, value=number, name=name, turn=turn))

    def finish(self, outcome: Outcome | str = Outcome.COMPLETED, error: str | None = None) -> None:
        """Say how the rollout ended. The first call stands; later ones change nothing.

        Call it inside the rollout to say more than leaving it would: `finish("budget")` when the
        agent used up its turns, `finish("env_error", "no container")` when the failure is not
        the agent's.

        Raises:
            ValueError: `outcome` is not one of the words in `Outcome`.
        """
        try:
            known = Outcome(outcome)
        except ValueError:
            words = ", ".join(Outcome)
            raise ValueError(f"outcome: expected one of {words}; got {outcome!r}") from None
        if not self._finished:
            self._finished = True
            self._emit(RolloutFinished(rollout_id=self.id, outcome=known, error=error))


def _finite(value: SupportsFloat) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        number = math.nan
    # A string is refused even where float() would read it: a reward is computed, not parsed.
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"value: expected a finite number, got {value!r}")
    return number


_rollout: ContextVar[Rollout | None] = ContextVar("tracegrad_rollout", default=None)
_tags: ContextVar[Mapping[str, str] | None] = ContextVar("tracegrad_tags", default=None)


def current() -> Rollout | None:
    """The rollout that the running code belongs to, or None outside of one."""
    return _rollout.get()


def require() -> Rollout:
    """The current rollout.

    Raises:
        RuntimeError: the running code belongs to none.
    """
    rollout = _rollout.get()
    if rollout is None:
        raise RuntimeError(
            "no rollout is open here: call this inside a function decorated with @trace or inside "
            "`with tracegrad.rollout(...)`. In a thread of your own, start it with "
            "contextvars.copy_context().run, or keep the rollout and call its reward()"
        )
    return rollout


@contextmanager
def inside(rollout: Rollout) -> Iterator[Rollout]:
    """Make `rollout` the current one for the code under `with`."""
    token = _rollout.set(rollout)
    try:
        yield rollout
    finally:
        # Left from another context than it was entered in (a fixture, a generator that was
        # closed by someone else): that context never held our value, so nothing is to be undone.
        with suppress(ValueError):
            _rollout.reset(token)


@contextmanager
def tags(mapping: Mapping[str, object] | None = None, /, **pairs: object) -> Iterator[None]:
    """Tag every rollout that is opened under `with`, as in `with tags(split="train"):`.

    Values are kept as text. Inner tags win over outer ones, a rollout's own over both.
    """
    token = _tags.set({**(_tags.get() or {}), **as_tags({**(mapping or {}), **pairs})})
    try:
        yield
    finally:
        with suppress(ValueError):
            _tags.reset(token)


def current_tags() -> dict[str, str]:
    """The tags that a rollout opened here gets: of TRACEGRAD_TAGS, then of `tags(...)`.

    Raises:
        ValueError: TRACEGRAD_TAGS is not of the form `key=value,key2=value2`.
    """
    return {**_environment_tags(), **(_tags.get() or {})}


def as_tags(mapping: Mapping[str, object]) -> dict[str, str]:
    return {str(key): str(value) for key, value in mapping.items()}


def _environment_tags() -> dict[str, str]:
    found = {}
    for part in filter(None, map(str.strip, os.environ.get("TRACEGRAD_TAGS", "").split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"TRACEGRAD_TAGS: {part!r} is not key=value; write key=value,key2=v2")
        found[key.strip()] = value.strip()
    return found


def proxy_url() -> str:
    """Where the proxy is: TRACEGRAD_URL, or `http://127.0.0.1:4141`; no trailing slash.

    Raises:
        ValueError: TRACEGRAD_URL is not the address of a server.
    """
    url = os.environ.get("TRACEGRAD_URL", "").strip() or DEFAULT_URL
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https") or not parts.hostname or path.endswith("/v1"):
        raise ValueError(
            f"TRACEGRAD_URL: {url!r} is not the proxy's address; give scheme, host and port "
            f"without /v1, such as {DEFAULT_URL}"
        )
    return f"{parts.scheme}://{parts.netloc}{path}"


def attribution(url: str) -> dict[str, str]:
    """The headers that tell the proxy whose call a request is; none for any other server.

    Args:
        url: the request's absolute URL.

    Returns:
        `x-tracegrad-rollout`, `baggage`, `x-tracegrad-key` if the rollout has a key and, inside
        a span, `traceparent`; empty outside a rollout or when `url` does not lead to its proxy.
    """
    rollout = _rollout.get()
    if rollout is None or _origin(url) != _origin(rollout.url):
        return {}
    headers = {ROLLOUT_HEADER: rollout.id, "baggage": f"{ROLLOUT_KEY}={rollout.id}"}
    if rollout.minted_key is not None:
        headers[KEY_HEADER] = rollout.minted_key
    from opentelemetry.trace import get_current_span  # not at import: it costs 20 ms

    span = get_current_span().get_span_context()
    if span.is_valid:
        flags = int(span.trace_flags)
        headers["traceparent"] = f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}"
    return headers


def _origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port; every name of this machine's loopback counts as the same host."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    if host in ("localhost", "::1") or host.startswith("127."):
        host = "loopback"
    return parts.scheme, host, port
