"""Where am I: which rollout the running code belongs to, and how an LLM call says so.

The answer lives in context variables, so every thread and every asyncio task has its own. A task
inherits it from the code that starts it; so do threads and what executors run (thread_patching.py).
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsFloat, TypeVar
from urllib.parse import urlsplit

from tracegrad.client_environ import HELD_OUT_VARIABLE, subprocess_environ
from tracegrad.events import (
    REWARD_RANGE,
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    is_reward,
    new_id,
)
from tracegrad.key_derivation import EVENTS, derive_key, is_secret_key
from tracegrad.protocol import (
    AGENT_HEADER,
    API_KEY_PREFIX,
    DEFAULT_URL,
    KEY_HEADER,
    ROLLOUT_ATTRIBUTE,
    ROLLOUT_HEADER,
    STATE_HEADER,
    agent_header,
)
from tracegrad.serializer import bounded_repr, bounded_str
from tracegrad.signal_errors import is_of_signal_handler
from tracegrad.urls import is_on_this_machine

_log = logging.getLogger("tracegrad")

T = TypeVar("T")
V = TypeVar("V")


# How a request names its rollout (a header, a W3C baggage key), and a span (an attribute).

MAX_TAG_BYTES = 1_000  # bytes of a tag's name, and of its value
MAX_ERROR_CHARS = 2_000
MAX_COMMENT_CHARS = 10_000


class Rollout:
    """One attempt at one task. `tracegrad.rollout()` and `@trace` open and finish it.

    Attributes:
        id: the rollout's id, 32 hex characters.
        task_id: the group that it is compared within, if it has one.
        url: the proxy that records it, without a trailing slash.
        held_out: whether it is for evaluation, and never trained.
    """

    def __init__(
        self,
        *,
        task_id: str | None,
        url: str,
        emit: Callable[[Event], None],
        drop: Callable[[str], int],
        admin_key: str | None = None,
        outer: Rollout | None = None,
        rollout_id: str | None = None,
        held_out: bool = False,
    ) -> None:
        """`drop` counts what is not sent, by reason, and returns the count. `admin_key` is
        TRACEGRAD_API_KEY, from which the rollout's own keys are derived; None where the proxy asks
        for none. `outer` is the rollout inside of which this one is opened. `rollout_id`: the place
        that it was given (`intake`); None: it needs none."""
        self.id = rollout_id or new_id()
        # The key of another rollout opens nothing for this one: its calls stay as they are.
        self.foreign = admin_key is not None and is_secret_key(admin_key)
        self._admin_key = None if self.foreign else admin_key
        self.own_key = derive_key(self._admin_key, self.id) if self._admin_key else None
        self.task_id = task_id
        self.url = url
        self.held_out = held_out
        self.rewarded = False  # whether its own reward (not a turn's, not another name) was given
        self.given_reward: float | None = None  # the last of them
        # Whether an LLM call may have been made: a request was signed, a URL or key given out, or a
        # span other than ours began.
        self.may_have_calls = False
        self.outcome: Outcome | None = None  # once it is finished
        self._left = False
        # Of processes that are forked inside of it: whether it was left meanwhile.
        self._left_in: tuple[int, mmap.mmap] | None = None
        self.has_inner = False  # whether another rollout was opened inside of it
        self.outer = outer
        if outer is not None:
            outer.has_inner = True
        self._emit = emit
        self._drop = drop

    @property
    def is_finished(self) -> bool:
        return self.outcome is not None

    def __repr__(self) -> str:
        return f"Rollout(id={self.id!r}, task_id={self.task_id!r})"

    @property
    def base_url(self) -> str:
        """The OpenAI base URL whose calls belong to this rollout, from any process."""
        self.may_have_calls = True
        return f"{self.url}/rollouts/{self.id}/v1"

    @property
    def api_key(self) -> str:
        """An API key for this rollout and no other, for agents in processes of their own.

        It calls models and nothing else: an agent gives itself no rewards. Where TRACEGRAD_API_KEY
        is not set it is no secret, and only names the rollout. Where it is, leave that one out of
        their environment: it opens every rollout. The key is derived from it and nobody is asked
        for it, so that it is there at once, whatever the proxy does.
        """
        self.may_have_calls = True
        return self.own_key or f"{API_KEY_PREFIX}{self.id}"

    @property
    def environ(self) -> dict[str, str]:
        """The environment for an agent in a process of its own, whose calls belong to this rollout:
        `subprocess.run(["some-agent"], env=rollout.environ)`.

        A copy of `os.environ` in which the base URLs and keys that OpenAI's, Anthropic's and
        Google's clients read lead here, without TRACEGRAD_API_KEY. Of a held-out rollout it has
        TRACEGRAD_HELD_OUT=1.
        """
        return subprocess_environ(self.base_url, self.api_key, held_out=self.held_out)

    @property
    def is_left(self) -> bool:
        """Whether the code that it was opened around has ended."""
        return self._left or (self._left_in is not None and self._left_in[1][0] != 0)

    def leave(self) -> None:
        self._left = True
        if self._left_in is not None and self._left_in[0] == os.getpid():
            self._left_in[1][0] = 1

    def share_with_children(self) -> None:
        """Before a fork: the child is to know when its parent leaves the rollout."""
        if self._left_in is None and not self._left:
            with suppress(OSError):
                self._left_in = os.getpid(), mmap.mmap(-1, 1)

    def __copy__(self) -> Rollout:
        return self

    def __deepcopy__(self, _: object) -> Rollout:
        return self  # as in an agent's state that a framework copies

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Rollout belongs to its process: give another one env=rollout.environ, or "
            "rollout.base_url and rollout.api_key; and to who scores it there rollout.id"
        )

    def around(self) -> Iterator[Rollout]:
        """The rollouts that this one was opened in, the innermost first."""
        outer = self.outer
        while outer is not None:
            yield outer
            outer = outer.outer

    @property
    def events_key(self) -> str | None:
        """A key that posts this rollout's rewards and its end (`/api/events`), for whoever scores
        the agent in a process of its own. Never give it to the agent.

        None where TRACEGRAD_API_KEY is not set: the proxy asks for no key.
        """
        return derive_key(self._admin_key, self.id, EVENTS) if self._admin_key else None

    def reward(
        self,
        value: SupportsFloat,
        *,
        turn: int | None = None,
        name: str = "reward",
        comment: str | None = None,
    ) -> None:
        """Give the rollout, or one of its turns, a reward.

        Rewards are events: they may come late, after the rollout finished, and of the same `name`
        and `turn` the one that reaches the proxy last counts.

        Args:
            value: a finite number from -1,000,000 to 1,000,000; a bool counts as 0 or 1. Anything
                else is dropped, with a warning that counts what was dropped.
            turn: which turn, counted from 0, or from the end if negative; None for the rollout.
            name: which reward, when there are several; training uses the one named "reward".
            comment: why it was given, for people to read.

        Raises:
            ValueError: `turn` is no integer, or `name` empty.
        """
        _check_place(turn, name)
        if (number := _number(value)) is None:
            _log.warning(
                "reward %s of rollout %s is dropped (%d so far): value: expected %s, got %s",
                bounded_repr(name),
                self.id,
                self._drop("invalid_reward"),
                REWARD_RANGE,
                bounded_repr(value),
            )
            return
        if turn is None and name == "reward":
            self.rewarded, self.given_reward = True, number
        said = (
            None if comment is None else bounded_str(comment, MAX_COMMENT_CHARS - 1)
        )  # and an ellipsis
        self._emit(Reward(rollout_id=self.id, value=number, name=name, turn=turn, comment=said))

    def withdraw_reward(self, *, turn: int | None = None, name: str = "reward") -> None:
        """Take back what `reward` gave: it is unknown again, which is not 0.

        Raises:
            ValueError: as `reward`.
        """
        _check_place(turn, name)
        self._emit(Reward(rollout_id=self.id, value=None, name=name, turn=turn))

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
        except Exception:
            words = ", ".join(Outcome)
            raise ValueError(
                f"outcome: expected one of {words}; got {bounded_repr(outcome)}"
            ) from None
        if self.outcome is None:
            self.outcome = known
            said = None if error is None else bounded_str(error, MAX_ERROR_CHARS)
            self._emit(RolloutFinished(rollout_id=self.id, outcome=known, error=said))

    def relay(self, event: Reward | RolloutFinished) -> None:
        """Says here what was said of it in another process."""
        if isinstance(event, RolloutFinished):
            self.finish(event.outcome, event.error)
            return
        if event.turn is None and event.name == "reward" and event.value is not None:
            self.rewarded, self.given_reward = True, event.value
        self._emit(event)


def _check_place(turn: int | None, name: str) -> None:
    """What a reward is of. Raises ValueError."""
    if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int)):
        raise ValueError(f"turn: expected an integer such as 0 or -1, got {bounded_repr(turn)}")
    if turn is not None and not -(2**31) < turn < 2**31:
        raise ValueError(f"turn: expected an index of a turn, got {bounded_repr(turn)}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: expected a non-empty string, got {bounded_repr(name)}")


def _number(value: SupportsFloat) -> float | None:
    """None: it is no reward."""
    # A text is none even where float() would read it: a reward is computed, not parsed.
    if issubclass(type(value), str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except Exception as error:  # an agent's own types may raise whatever they like
        if is_of_signal_handler(error):  # it may have waited for a GPU
            raise
        return None
    return number if is_reward(number) else None


_rollout: ContextVar[Rollout | None] = ContextVar("tracegrad_rollout", default=None)


@dataclass(frozen=True)
class CallDetails:
    """What LLM calls of `rollout` say of themselves: the key of the environment's state, and which
    of several agents calls."""

    rollout: Rollout | None = None
    state: str | None = None
    agent: str | None = None


_NOTHING = CallDetails()
_details: ContextVar[CallDetails] = ContextVar("tracegrad_details", default=_NOTHING)
_tags: ContextVar[Mapping[str, str] | None] = ContextVar("tracegrad_tags", default=None)


# The rollout that the thread was started in, and its tags: once it is finished, others may work
# here.
_until_finished: ContextVar[tuple[Rollout | None, Mapping[str, str] | None]] = ContextVar(
    "tracegrad_until_finished", default=(None, None)
)


# The rollout of the job that an executor runs: the job is its own, however late it runs.
_job: ContextVar[Rollout | None] = ContextVar("tracegrad_job", default=None)


def current() -> Rollout | None:
    """The rollout that the running code belongs to, or None outside of one.

    A task, a thread or a forked process that outlives its rollout belongs to the one around that,
    if that lasts.
    """
    rollout = _rollout.get()
    if rollout is None or rollout is _job.get():
        return rollout
    if rollout.is_finished and rollout is _until_finished.get()[0]:
        return None
    while rollout is not None and rollout.is_left:
        rollout = rollout.outer
    return rollout


def is_stray() -> bool:
    """Whether the running code outlived the rollouts that it was started in."""
    return _rollout.get() is not None and current() is None


def _share_before_fork() -> None:
    here = _rollout.get()
    for each in [here, *here.around()] if here is not None else ():
        each.share_with_children()


os.register_at_fork(before=_share_before_fork)


def _current_tags() -> Mapping[str, str]:
    started_in, inherited = _until_finished.get()
    tags = _tags.get()
    if tags is inherited and started_in is not None and started_in.is_finished:
        return {}
    return tags or {}


def carried(function: Callable[..., T], *, until_finished: bool = False) -> Callable[..., T]:
    """`function`, run in the rollout, turn, tags and span of the code that calls this, in
    whichever thread. `until_finished`: no longer than the rollout lasts."""
    rollout, details, tags = _rollout.get(), _details.get(), _tags.get()
    spans: Any = sys.modules.get("opentelemetry.context")
    span = spans.get_current() if spans is not None else None
    started_in = (rollout, tags) if until_finished else (None, None)
    job = None if until_finished or current() is None else rollout

    def run(*args: Any, **kwargs: Any) -> T:
        # Outside of rollouts OpenTelemetry's context is the agent's own affair, but for a thread
        # that was started in a rollout: the span of that one is not to become a parent here.
        spanned = spans is not None and (rollout or _until_finished.get()[0]) is not None
        tokens: list[tuple[ContextVar[Any], Token[Any]]] = [
            (_rollout, _rollout.set(rollout)),
            (_details, _details.set(details)),
            (_tags, _tags.set(tags)),
            (_until_finished, _until_finished.set(started_in)),
            (_job, _job.set(job)),
        ]
        attached = spans.attach(span) if spanned else None
        try:
            return function(*args, **kwargs)
        finally:
            if spanned:
                spans.detach(attached)
            for variable, token in reversed(tokens):
                variable.reset(token)

    return run


def require() -> Rollout:
    """The current rollout.

    Raises:
        RuntimeError: the running code belongs to none.
    """
    rollout = _rollout.get()  # a finished one too: rewards may come late
    if rollout is None:
        raise RuntimeError(
            "no rollout is open here: call this inside a function decorated with @trace or inside "
            "`with tracegrad.rollout(...)`; in another process or a thread that was there before, "
            "keep the rollout and call its reward()"
        )
    return rollout


class _Set(AbstractContextManager[T]):
    """`with _Set(variable, value, given):` gives `given`, and the variable has `value` inside.

    Not a generator: contextlib writes to the exception that passes through one, which an immutable
    exception of the agent's refuses.
    """

    def __init__(self, variable: ContextVar[V], value: V, given: T) -> None:
        self._variable: ContextVar[Any] = variable
        self._value = value
        self._given = given

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._given

    def __exit__(self, *error: object) -> None:
        # Left from another context than it was entered in (a fixture, a generator that was
        # closed by someone else): that context never held our value, so nothing is to be undone.
        with suppress(ValueError):
            self._variable.reset(self._token)


def use_rollout(rollout: Rollout) -> AbstractContextManager[Rollout]:
    """Make `rollout` the current one for the code under `with`."""
    return _Set(_rollout, rollout, rollout)


def current_details() -> CallDetails:
    """What LLM calls of the current rollout say here."""
    rollout, details = _rollout.get(), _details.get()
    # What is around a rollout says nothing of its calls.
    return details if details.rollout is rollout else CallDetails(rollout)


def use_details(details: CallDetails) -> AbstractContextManager[None]:
    """What LLM calls say under `with`."""
    return _Set(_details, details, None)


def tags(
    mapping: Mapping[str, object] | None = None, /, **pairs: object
) -> AbstractContextManager[None]:
    """Tag every rollout that is opened under `with`, as in `with tags(split="train"):`.

    Values are kept as text. Inner tags win over outer ones, a rollout's own over both.
    """
    own = {**as_tags(mapping or {}), **as_tags(pairs)}
    return _Set(_tags, {**_current_tags(), **own}, None)


def current_tags() -> dict[str, str]:
    """The tags that a rollout opened here gets: of TRACEGRAD_TAGS, then of `tags(...)`.

    Raises:
        ValueError: TRACEGRAD_TAGS is not of the form `key=value,key2=value2`.
    """
    return {**_environment_tags(), **_current_tags()}


def as_tags(mapping: Mapping[str, object]) -> dict[str, str]:
    """As text, each short enough for the store. Raises ValueError for what is no mapping."""
    if not isinstance(mapping, Mapping):
        raise ValueError(
            f"tags: expected a mapping such as {{'split': 'train'}}, got {bounded_repr(mapping)}"
        )
    return {_tag(key): _tag(value) for key, value in mapping.items()}


def _tag(value: object) -> str:
    text = bounded_str(value, MAX_TAG_BYTES)
    while len(text.encode("utf-8", "replace")) > MAX_TAG_BYTES:
        text = f"{text[: len(text) * 3 // 4]}…"
    return text


def _environment_tags() -> dict[str, str]:
    found = {}
    for part in filter(None, map(str.strip, os.environ.get("TRACEGRAD_TAGS", "").split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"TRACEGRAD_TAGS: {part!r} is not key=value; write key=value,key2=v2")
        found[key.strip()] = value.strip()
    return found


def environment_held_out() -> bool:
    """TRACEGRAD_HELD_OUT.

    Raises:
        ValueError: it is neither 1 nor 0.
    """
    said = os.environ.get(HELD_OUT_VARIABLE, "").strip()
    if said not in ("", "0", "1"):
        raise ValueError(f"{HELD_OUT_VARIABLE}: {said!r:.40}; write 1, or 0")
    return said == "1"


def proxy_url(given: str | None = None) -> str:
    """Where the proxy is: `given`, TRACEGRAD_URL, or `http://127.0.0.1:4141`; no trailing slash.

    Raises:
        ValueError: what says it is not the address of a server.
    """
    url = given or os.environ.get("TRACEGRAD_URL", "").strip() or DEFAULT_URL
    try:
        return _base(url)
    except ValueError:
        shown = "it" if "@" in url else ascii(url)  # a password is nobody's to read
        name = "url" if given else "TRACEGRAD_URL"
        raise ValueError(
            f"{name}: {shown} is not the proxy's address; give scheme, host and port "
            f"without /v1, such as {DEFAULT_URL}"
        ) from None


@functools.lru_cache(maxsize=8)
def _base(url: str) -> str:
    """Without a trailing slash. Raises ValueError."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    # The port: reading it raises where it is none.
    whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    more = parts.query or parts.fragment or "@" in parts.netloc or path.endswith("/v1")
    if not whole or more or not url.isprintable() or " " in url:
        raise ValueError
    return f"{parts.scheme}://{parts.netloc}{path}"


def attribution_headers(url: str) -> dict[str, str]:
    """The headers that tell the proxy whose call a request is; none for any other server.

    Args:
        url: the request's absolute URL.

    Returns:
        `x-tracegrad-rollout`, `baggage`, `x-tracegrad-key` if the rollout has a key, under
        `turn(state=..., agent=...)` `x-tracegrad-state` and `x-tracegrad-agent`, and inside a span
        `traceparent`; empty outside a rollout, when `url` does not lead to its proxy or leads to
        what is no agent's to ask there (`/api/...`), or when TRACEGRAD_API_KEY is another
        rollout's, for which the proxy would refuse the call.
    """
    rollout = current()
    if rollout is None or rollout.foreign or _origin(url) != _origin(rollout.url):
        return {}
    if urlsplit(url).path.startswith(f"{urlsplit(rollout.url).path}/api/"):
        return {}
    rollout.may_have_calls = True
    headers = {ROLLOUT_HEADER: rollout.id, "baggage": f"{ROLLOUT_ATTRIBUTE}={rollout.id}"}
    if rollout.own_key is not None:
        headers[KEY_HEADER] = rollout.own_key
    details = _details.get()
    if details.rollout is rollout:  # what is around a rollout is another environment
        if details.state is not None:
            headers[STATE_HEADER] = details.state
        if details.agent is not None:
            headers[AGENT_HEADER] = agent_header(details.agent)
    from opentelemetry.trace import get_current_span  # not at import: it costs 20 ms

    span = get_current_span().get_span_context()
    if span.is_valid:
        flags = int(span.trace_flags)
        headers["traceparent"] = f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}"
    return headers


def _origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port; every name of this machine's loopback counts as the same host."""
    parts = urlsplit(url)
    host = "loopback" if is_on_this_machine(url) else parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, host, port
