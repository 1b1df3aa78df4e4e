"""`@trace` and `rollout`: where a rollout begins and ends around an agent's own code."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import Any, Generic, SupportsFloat, TypeVar, cast, overload

from tracegrad import client, context, propagation, tasks
from tracegrad.context import Rollout
from tracegrad.records import Outcome, RolloutOpened

_log = logging.getLogger("tracegrad")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class rollout(AbstractContextManager[Rollout]):
    """One attempt at one task: every LLM call, span and reward under `with` belongs to it.

    Works as `with` and as `async with`, and gives the `Rollout`. Leaving it finishes the rollout,
    unless it was finished inside: "completed"; "agent_error" if an exception leaves (it goes on
    to the caller); "aborted" if a cancellation, an interrupt or an exit does. A rollout inside
    another one is a rollout of its own.

    Args:
        task: the task's id, the group that this attempt is compared within. None: no group.
        tags: what to select rollouts by; values are kept as text. Added to those of
            `tags(...)` and of TRACEGRAD_TAGS, and stronger than both.
        agent: the agent's name.
        input: what was asked, for people to read; anything, kept as JSON.
        name: the name of the rollout's outermost span; the agent's name if None.

    Raises:
        ValueError: an argument, TRACEGRAD_URL, TRACEGRAD_TAGS or TRACEGRAD_API_KEY is not what
            it must be.
        NoKey: TRACEGRAD_API_KEY is set, and the proxy does not make the rollout a key.
    """

    def __init__(
        self,
        task: str | None = None,
        *,
        tags: Mapping[str, object] | None = None,
        agent: str | None = None,
        input: Any = None,
        name: str | None = None,
    ) -> None:
        for field, value in (("task", task), ("agent", agent), ("name", name)):
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{field}: expected a non-empty string or None, got {value!r}")
        self._task, self._agent, self._input = task, agent, input
        self._name = name or agent or "rollout"
        self._tags = context.as_tags(tags or {})
        self._scope: ExitStack | None = None

    def __enter__(self) -> Rollout:
        if self._scope is not None:
            raise RuntimeError("this rollout was opened before: write a new rollout(...) for each")
        tags = {**context.current_tags(), **self._tags}
        outbox = client.outbox(context.proxy_url())
        self._process = os.getpid()
        self._rollout = opened = Rollout(
            task_id=self._task, url=outbox.url, emit=outbox.put, mint=outbox.mint
        )
        outbox.put(
            RolloutOpened(
                rollout_id=opened.id,
                task_id=opened.task_id,
                agent=self._agent,
                tags=tags,
                task=tasks.plain(self._input),
            )
        )
        propagation.install()
        with ExitStack() as scope:
            scope.enter_context(context.inside(opened))
            scope.enter_context(_span(self._name, outbox.url))
            self._scope = scope.pop_all()
        return opened

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._scope is not None, "a rollout is entered before it is left"
        self._scope.__exit__(kind, error, trace)
        if os.getpid() != self._process:
            return  # a forked child unwinds a copy of the stack: the rollout is its parent's
        if error is None:
            self._rollout.finish()
        else:
            agents_own = isinstance(error, Exception)
            outcome = Outcome.AGENT_ERROR if agents_own else Outcome.ABORTED
            self._rollout.finish(outcome, _in_a_line(error))

    async def __aenter__(self) -> Rollout:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


def reward(value: SupportsFloat, *, name: str = "reward", turn: int | None = None) -> None:
    """Give the current rollout, or one of its turns, a reward; see `Rollout.reward`.

    Raises:
        RuntimeError: no rollout is open here.
        ValueError: `value` is not a finite number, `turn` no integer, or `name` empty.
    """
    context.require().reward(value, name=name, turn=turn)


@overload
def trace(function: F, /) -> F: ...
@overload
def trace(
    *,
    task: str | Callable[..., object] | None = None,
    name: str | None = None,
    agent: str | None = None,
    tags: Mapping[str, object] | None = None,
) -> Callable[[F], F]: ...
def trace(
    function: F | None = None,
    /,
    *,
    task: str | Callable[..., object] | None = None,
    name: str | None = None,
    agent: str | None = None,
    tags: Mapping[str, object] | None = None,
) -> F | Callable[[F], F]:
    """Record what a function does: `@trace`, or `@trace(task=..., agent=...)`.

    A call outside a rollout opens one, for as long as it runs, and a number (or bool) that it
    returns is the rollout's reward, unless `reward()` gave it one. A call inside a rollout is a
    span of that rollout, and nothing else here applies to it. Arguments, results and
    exceptions pass through unchanged. Takes plain functions, coroutine functions, generators and
    async generators; a generator runs in a context of its own, and is aborted if closed early.

    Args:
        task: the task's id, or a function of the call's arguments that returns it. None: a hash
            of the function's name and the arguments, so that equal calls form a group.
        name: the span's name. None: the function's.
        agent: the agent's name. None: the span's.
        tags: what to select rollouts by, as in `rollout`.

    Raises:
        ValueError: what is decorated is not a function.
    """

    def decorate(function: F) -> F:
        if isinstance(function, type | staticmethod | classmethod) or not callable(function):
            raise ValueError(
                f"@trace: expected a function, got {function!r}; decorate a class's methods, and "
                "put @trace below @staticmethod or @classmethod"
            )
        span = name or tasks.qualified_name(function)
        return _wrap(_Traced(function, span, agent or span, task, dict(tags or {})))

    return decorate if function is None else decorate(function)


@dataclass(frozen=True)
class _Traced(Generic[F]):
    function: F
    name: str
    agent: str
    task: str | Callable[..., object] | None
    tags: Mapping[str, object]

    def begin(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Rollout | None]:
        """A new rollout, which `with` gives; or a span of the current one, and None."""
        here = context.current()
        if here is not None:
            propagation.install()
            return _span(self.name, here.url)
        try:
            call = inspect.signature(self.function).bind(*args, **kwargs)
            call.apply_defaults()
            arguments: Mapping[str, object] = call.arguments
        except (TypeError, ValueError):  # no such call: the function itself says so best
            arguments = {"args": args, "kwargs": kwargs}
        if callable(self.task):
            task = str(self.task(*args, **kwargs))
        else:
            task = self.task or tasks.task_id(self.function, arguments)
        return rollout(task, tags=self.tags, agent=self.agent, input=arguments, name=self.name)


def _wrap(traced: _Traced[F]) -> F:
    function: Callable[..., Any] = traced.function
    wrapper: Callable[..., Any]
    if inspect.isasyncgenfunction(function):

        async def wrapper(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            here = copy_context()
            with _In(here, traced.begin(args, kwargs)):
                generator = function(*args, **kwargs)
                step, value = generator.asend, None
                try:
                    while True:
                        item = await _AwaitIn(here, step(value))
                        try:
                            step, value = generator.asend, (yield item)
                        except GeneratorExit:
                            raise
                        except BaseException as error:
                            step, value = generator.athrow, error
                except StopAsyncIteration:
                    return
                finally:
                    await _AwaitIn(here, generator.aclose())

    elif inspect.isgeneratorfunction(function):

        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            here = copy_context()
            with _In(here, traced.begin(args, kwargs)) as opened:
                returned = yield from _each_in(here, function(*args, **kwargs))
                _score(opened, returned)
                return returned

    elif inspect.iscoroutinefunction(function):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with traced.begin(args, kwargs) as opened:
                returned = await function(*args, **kwargs)
                _score(opened, returned)
                return returned

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with traced.begin(args, kwargs) as opened:
                returned = function(*args, **kwargs)
                _score(opened, returned)
                return returned

    return cast(F, functools.update_wrapper(wrapper, function))


def _score(opened: Rollout | None, returned: object) -> None:
    if opened is None or opened.rewarded or not isinstance(returned, Real):
        return
    try:
        opened.reward(returned)
    except ValueError as error:
        _log.warning("what rollout %s returned is not its reward: %s", opened.id, error)


def _span(name: str, url: str) -> AbstractContextManager[None]:
    from tracegrad.telemetry import (
        Span,
    )  # OpenTelemetry is loaded with the first rollout, not on import

    return Span(name, url)


def _in_a_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:2000]


# A generator's body runs in whatever context resumes it. To keep its rollout from its caller, and
# its caller's from it, all of its steps are run in one context of its own.


@dataclass(frozen=True)
class _In(AbstractContextManager[T]):
    """`with manager:`, entered and left in the context `here`."""

    here: Context
    manager: AbstractContextManager[T]

    def __enter__(self) -> T:
        return self.here.run(self.manager.__enter__)

    def __exit__(self, *error: Any) -> bool | None:
        return self.here.run(self.manager.__exit__, *error)


@dataclass(frozen=True)
class _AwaitIn(Generic[T]):
    """`await awaitable`, each of its steps in the context `here`."""

    here: Context
    awaitable: Awaitable[T]

    def __await__(self) -> Generator[Any, Any, T]:
        return (yield from _each_in(self.here, self.awaitable.__await__()))


def _each_in(here: Context, generator: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """`yield from generator`, each of its steps in the context `here`."""
    step: Callable[[Any], Any] = generator.send
    value: Any = None
    while True:
        try:
            item = here.run(step, value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        try:
            step, value = generator.send, (yield item)
        except GeneratorExit:
            here.run(generator.close)
            raise
        except BaseException as error:
            step, value = generator.throw, error
