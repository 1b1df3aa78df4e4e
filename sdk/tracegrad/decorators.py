"""`@trace` and `rollout`: where a rollout begins and ends around an agent's own code."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    _AsyncGeneratorContextManager,
    _GeneratorContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    TracebackType,
)
from typing import Any, Generic, SupportsFloat, TypeVar, cast, overload

from tracegrad import (
    context,
    dspy_cache,
    exporter,
    http_patching,
    intake_client,
    task_ids,
    thread_patching,
    transport,
)
from tracegrad.call_check import RewardedRollout
from tracegrad.context import Rollout
from tracegrad.events import Outcome, RolloutStarted
from tracegrad.open_rollouts import OpenRollout
from tracegrad.protocol import MAX_AGENT_NAME
from tracegrad.serializer import bounded_repr, error_line
from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Reward(float):
    """A number that a function of `@trace` returns as its rollout's reward: `return Reward(0.5)`.

    To the caller it is the number itself.
    """


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
        held_out: it is for evaluation: whatever the trainer's settings and its tags are, it is
            never trained, and in no group. So are rollouts inside of it, those of processes with
            its `environ`, and all of a process with TRACEGRAD_HELD_OUT=1.
        environ: whether `os.environ` leads here meanwhile (OPENAI_BASE_URL, OPENAI_API_KEY and
            those of Anthropic's and Google's clients), for clients that read it when they are made
            inside and send by other means than httpx, requests or aiohttp. What was there comes
            back afterwards. The environment is one for the process: no other rollout may be open
            beside this one. Rollouts inside of it set their own.

    Nothing here waits for the proxy, and no argument, however large or strange, makes the code
    inside fail: what cannot be kept in full is cut, and says so. What is wrong in your own program
    raises before any of it runs.

    Raises:
        ValueError: an argument, TRACEGRAD_URL, TRACEGRAD_TAGS, TRACEGRAD_HELD_OUT,
            TRACEGRAD_API_KEY or TRACEGRAD_JOURNAL_BYTES is not what it must be; or `environ`, and
            another rollout is open beside this one.
    """

    def __init__(
        self,
        task: str | None = None,
        *,
        tags: Mapping[str, object] | None = None,
        agent: str | None = None,
        input: Any = None,
        name: str | None = None,
        held_out: bool = False,
        environ: bool = False,
    ) -> None:
        _check_names(task=task, agent=agent, name=name)
        _check_held_out(held_out)
        self._task, self._agent, self._input = task and task_ids.bounded_task_id(task), agent, input
        self._name, self._environ = name or agent or "rollout", environ
        self._tags, self._held_out = context.as_tags(tags or {}), held_out
        self._scope: ExitStack | None = None

    def __enter__(self) -> Rollout:
        if self._scope is not None:
            raise RuntimeError("this rollout was opened before: write a new rollout(...) for each")
        tags = {**context.current_tags(), **self._tags}
        stray = context.is_stray()
        self._exporter = to = exporter.exporter(context.proxy_url())
        self._process = os.getpid()
        outer = context.current()
        held_out = self._held_out or context.environment_held_out()
        held_out = held_out or (outer is not None and outer.held_out)
        # Places are for what is trained.
        place = intake_client.take_place() if outer is None and not held_out else None
        self._rollout = opened = Rollout(
            task_id=self._task,
            url=to.url,
            emit=to.put,
            drop=to.drop,
            admin_key=transport.api_key(),
            outer=outer,
            rollout_id=place,
            held_out=held_out,
        )
        self._before = dspy_cache.last_call()
        with ExitStack() as scope:
            # Refuses before anything is recorded of what will not run.
            scope.enter_context(OpenRollout(opened, environ=self._environ))
            to.put(
                RolloutStarted(
                    rollout_id=opened.id,
                    task_id=opened.task_id,
                    agent=self._agent,
                    tags=tags,
                    task=self._input,
                    held_out=held_out,
                )
            )
            try:
                _wrap_libraries()
                scope.enter_context(context.use_rollout(opened))
                scope.enter_context(_span(self._name, to.url, root=stray))
            except BaseException as error:  # Ctrl-C: OpenTelemetry takes a while to import
                opened.leave()
                opened.finish(Outcome.ABORTED, error_line(error, context.MAX_ERROR_CHARS))
                raise
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
        self._rollout.leave()
        if os.getpid() != self._process:
            return  # a forked child unwinds a copy of the stack: the rollout is its parent's
        outcome, said = Outcome.COMPLETED, None
        if error is not None:
            agents_own = isinstance(error, Exception)
            outcome = Outcome.AGENT_ERROR if agents_own else Outcome.ABORTED
            said = error_line(error, context.MAX_ERROR_CHARS)
        compared = self._task is not None and not self._rollout.held_out
        # A rollout that a cache answered has no calls; how to give it some is said here.
        if not (compared and dspy_cache.warn_of_cached_answers(self._before)):
            self._expect_calls(outcome)
        self._rollout.finish(outcome, said)

    def _expect_calls(self, outcome: Outcome) -> None:
        """A score without any call that it could be of trains nothing. Rollouts inside of this one
        have their own calls, and another rollout's key makes calls of that one."""
        ended = self._rollout
        scored = ended.rewarded and (ended.outcome or outcome).scored
        if scored and not ended.has_inner and not ended.foreign:
            self._exporter.calls.watch(
                RewardedRollout(
                    rollout_id=ended.id,
                    name=self._name,
                    environ=self._environ,
                    may_have_calls=ended.may_have_calls,
                )
            )

    async def __aenter__(self) -> Rollout:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{4,}")
_warned_tasks: set[tuple[str, str]] = set()  # the traced function, and the one that names its tasks


def reward(
    value: SupportsFloat,
    *,
    name: str = "reward",
    turn: int | None = None,
    comment: str | None = None,
) -> None:
    """Give the current rollout, or one of its turns, a reward; see `Rollout.reward`.

    Raises:
        RuntimeError: no rollout is open here.
        ValueError: `turn` is no integer, or `name` empty.
    """
    context.require().reward(value, name=name, turn=turn, comment=comment)


_AS_AROUND = object()


def turn(*, state: object = _AS_AROUND, agent: str | None = None) -> AbstractContextManager[None]:
    """LLM calls under `with` are made in this state of the environment, or by this agent.

        with turn(state=env.board()):
            reply = client.chat.completions.create(...)

    What is not given is as it is around it.

    Turns of equal states are compared with each other (objective `gigpo`), in all rollouts of a
    task. Without it, or where `state` is None, a turn's state is what was observed last: the
    messages behind the last reply. Of several agents those that are to be trained are chosen by
    name (`batches.agents`). An agent without this package sends the headers `x-tracegrad-state`
    and `x-tracegrad-agent` itself.

    Args:
        state: a short text, which is stored as it is, or anything that JSON can say, of which a
            digest is stored. Leave out what differs between rollouts and does not matter, such
            as times and ids.
        agent: the name of the agent that calls, in a rollout of several.

    Raises:
        ValueError: `agent` is empty, or no text.
    """
    _check_names(agent=agent)
    details = context.current_details()
    if agent is not None:
        details = replace(details, agent=agent[:MAX_AGENT_NAME])
    if state is not _AS_AROUND:
        key = task_ids.state_key(state)
        if key is None and state is not None:
            _log.warning(
                "turn(state=...): an object of %s is too large for a state's key", type(state)
            )
        details = replace(details, state=key)
    return context.use_details(details)


@overload
def trace(function: F, /) -> F: ...
@overload
def trace(
    *,
    task: str | Callable[..., object] | None = None,
    name: str | None = None,
    agent: str | None = None,
    tags: Mapping[str, object] | None = None,
    reward: bool | Callable[[Any], SupportsFloat | None] = False,
    held_out: bool | Callable[..., object] = False,
    environ: bool = False,
) -> Callable[[F], F]: ...
def trace(
    function: F | None = None,
    /,
    *,
    task: str | Callable[..., object] | None = None,
    name: str | None = None,
    agent: str | None = None,
    tags: Mapping[str, object] | None = None,
    reward: bool | Callable[[Any], SupportsFloat | None] = False,
    held_out: bool | Callable[..., object] = False,
    environ: bool = False,
) -> F | Callable[[F], F]:
    """Record what a function does: `@trace`, or `@trace(task=..., agent=...)`.

    A call outside a rollout opens one, for as long as it runs. What it returns is an answer and no
    reward, unless you say so: `@trace(reward=...)`, or `return Reward(0.5)`; `reward()` inside
    goes before both. A call inside a rollout is a span of that rollout, and nothing else here
    applies to it. Arguments, results and exceptions pass through unchanged. Takes plain functions,
    coroutine functions, generators and async generators; a generator runs in a context of its own,
    and is aborted if closed early. The rollout of a plain function that returns a generator, a
    coroutine or a context manager is over when that begins to run: a warning says so once.

    Args:
        task: the task's id, or a function of the call's arguments that returns it; where that
            raises, or returns None, the rollout has no task. None: a hash of the function's name
            and the arguments, so that equal calls form a group.
        name: the span's name. None: the function's.
        agent: the agent's name. None: the span's.
        tags: what to select rollouts by, as in `rollout`.
        reward: True: the number (or bool) that the function returns is the rollout's reward; or a
            function of what it returns that gives the reward. None is no reward.
        held_out: whether its rollouts are never trained, as in `rollout`; or a function of the
            call's arguments that says it. One that raises leaves them held out, with a warning.
        environ: whether `os.environ` leads clients to the rollout meanwhile, as in `rollout`. Not
            for generators: what runs between their steps is no part of the rollout.

    Raises:
        ValueError: what is decorated is not a function, or an argument is not what it must be.
        TypeError: `environ`, and a generator or a context manager; `reward`, and an async
            generator, which returns nothing.
    """
    if not callable(task):
        _check_names(task=task)
    _check_names(name=name, agent=agent)
    if not callable(held_out):
        _check_held_out(held_out)
    tags = context.as_tags(tags or {})
    if not isinstance(reward, bool) and not callable(reward):
        raise ValueError(
            "reward: expected True, False or a function of the result, got "
            f"{bounded_repr(reward)}; give a number with tracegrad.reward(...) inside the function"
        )

    def decorate(function: F) -> F:
        if isinstance(function, type | staticmethod | classmethod) or not callable(function):
            raise ValueError(
                f"@trace: expected a function, got {function!r}; decorate a class's methods, and "
                "put @trace below @staticmethod or @classmethod"
            )
        if environ and (kind := _suspended_kind(function)):
            raise _no_environ(task_ids.qualified_name(function), kind)
        if reward and _is(inspect.isasyncgenfunction, function):
            raise TypeError(
                f"@trace(reward=...): {task_ids.qualified_name(function)} is an async generator, "
                "which returns nothing that could be its reward: call tracegrad.reward(...) inside"
            )
        exporter.send_orphaned_at_exit(context.proxy_url)
        span = name or task_ids.qualified_name(function)
        return _wrap(
            _Traced(
                function,
                _signature(function),
                span,
                agent or span,
                task,
                tags,
                reward,
                held_out,
                environ,
            )
        )

    return decorate if function is None else decorate(function)


@dataclass(frozen=True)
class _Traced(Generic[F]):
    function: F
    signature: inspect.Signature | None
    name: str
    agent: str
    task: str | Callable[..., object] | None
    tags: Mapping[str, object]
    reward: bool | Callable[[Any], SupportsFloat | None]
    held_out: bool | Callable[..., object]
    environ: bool

    def begin(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Rollout | None]:
        """A new rollout, which `with` gives; or a span of the current one, and None."""
        here = context.current()
        if here is not None:
            _wrap_libraries()
            return _span(self.name, here.url)
        arguments: Mapping[str, object] = {"args": args, "kwargs": kwargs}
        if self.signature is not None:
            with suppress(TypeError):  # no such call: the function itself says so best
                call = self.signature.bind(*args, **kwargs)
                call.apply_defaults()
                arguments = call.arguments
        task, plain = task_ids.task_and_input(self.function, arguments)
        return rollout(
            self._named_task(args, kwargs) if callable(self.task) else self.task or task,
            tags=self.tags,
            agent=self.agent,
            input=plain,
            name=self.name,
            held_out=self._is_held_out(args, kwargs),
            environ=self.environ,
        )

    def _is_held_out(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """What the caller's own function says; True where it cannot tell: what is to be looked at
        must not be trained."""
        if not callable(self.held_out):
            return self.held_out
        try:
            return bool(self.held_out(*args, **kwargs))
        except Exception as error:  # the agent's call is not to fail for it
            if is_of_signal_handler(error):
                raise
            _log.warning("held_out of @trace failed for %s: held out", self.name, exc_info=True)
            return True

    def _named_task(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """What the caller's own function says; None, which is no task, where it says nothing."""
        assert callable(self.task)
        try:
            named = self.task(*args, **kwargs)
            # A plain str: a subclass may do as it likes.
            text = "" if named is None else str.__str__(str(named))
            if inspect.iscoroutine(named):
                named.close()  # never awaited, and said so here
            # An address: another one in every call.
            if text and not _ADDRESS.search(text):
                return text
            wrong = f"returned {bounded_repr(named)}"
        except Exception as error:  # the agent's call is not to fail for its name
            if is_of_signal_handler(error):
                raise
            wrong = f"raised {error_line(error, context.MAX_ERROR_CHARS)}"
        try:
            function = task_ids.qualified_name(self.task)
        except Exception:  # an object of the agent's that raises whatever is asked of it
            function = type(self.task).__name__
        if (self.name, function) not in _warned_tasks:
            _warned_tasks.add((self.name, function))
            _log.warning(
                "task of @trace: %s, called for %s, %s: the rollout has no task, and is compared "
                "with no other. This warning comes once for each function",
                function,
                self.name,
                wrong,
            )
        return None

    def score(self, opened: Rollout | None, returned: Any) -> None:
        """Gives the rollout that the call opened the reward that is declared, if any."""
        if opened is None or opened.rewarded:
            return
        value: SupportsFloat | None = None
        if callable(self.reward):
            try:
                value = self.reward(returned)
            except Exception as error:  # the agent's call is not to fail for its score
                if is_of_signal_handler(error):
                    raise
                _log.warning("reward of @trace failed for %s", self.name, exc_info=True)
        # The type: an object of the agent's may lie about its class, or raise when asked.
        elif self.reward or issubclass(type(returned), Reward):
            value = returned
        if value is not None:
            opened.reward(value)


def _check_names(**given: object) -> None:
    """Raises ValueError."""
    for field, value in given.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(
                f"{field}: expected a non-empty string or None, got {bounded_repr(value)}"
            )


def _check_held_out(given: object) -> None:
    """Raises ValueError."""
    if not isinstance(given, bool):
        raise ValueError(f"held_out: expected True or False, got {bounded_repr(given)}")


# What runs behind the functions that these make.
_makes_nothing: Any = lambda: None  # noqa: E731
_MANAGERS = {make(_makes_nothing).__code__ for make in (contextmanager, asynccontextmanager)}


def _suspended_kind(function: Callable[..., Any]) -> str | None:
    """What it is, if others run between its steps."""
    if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
        return "a generator"
    if isinstance(function, FunctionType) and function.__code__ in _MANAGERS:
        return "a context manager"
    return None


def _no_environ(function: str, kind: str) -> TypeError:
    return TypeError(
        f"@trace(environ=True): {function} is {kind}. Others run between its steps, and os.environ "
        "is one for the whole process: their clients would call this rollout. Put "
        "@trace(environ=True) on a function that runs it to its end; or leave environ=True out and "
        "give the client base_url=rollout.base_url of `with tracegrad.rollout(...) as rollout`"
    )


_warned_lazy: set[str] = set()
_LAZY = (
    GeneratorType,
    AsyncGeneratorType,
    CoroutineType,
    _GeneratorContextManager,
    _AsyncGeneratorContextManager,
)


def _warn_of_lazy(name: str, returned: object) -> None:
    """The rollout is over, and what it was opened for has not begun."""
    # The type: an object of the agent's may lie about its class, or raise when asked.
    if name not in _warned_lazy and issubclass(type(returned), _LAZY):
        _warned_lazy.add(name)
        _log.warning(
            "@trace: %s returned a %s, which runs after its rollout has ended: calls in it belong "
            "to nobody. Decorate the function that runs it (the `async def` or the generator "
            "itself, below other decorators), or write `with tracegrad.rollout(...)` around it. "
            "This warning comes once for each function",
            name,
            type(returned).__name__.lstrip("_"),
        )


def _is(kind: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    """Of an object that can be called its `__call__` says it."""
    return kind(function) or kind(type(function).__call__)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return None


def _wrap(traced: _Traced[F]) -> F:
    function: Callable[..., Any] = traced.function
    wrapper: Callable[..., Any]
    if _is(inspect.isasyncgenfunction, function):

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

    elif _is(inspect.isgeneratorfunction, function):

        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            here = copy_context()
            with _In(here, traced.begin(args, kwargs)) as opened:
                returned = yield from _each_in(here, function(*args, **kwargs))
                traced.score(opened, returned)
                return returned

    elif _is(inspect.iscoroutinefunction, function):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with traced.begin(args, kwargs) as opened:
                returned = await function(*args, **kwargs)
                traced.score(opened, returned)
                return returned

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with traced.begin(args, kwargs) as opened:
                returned = function(*args, **kwargs)
                traced.score(opened, returned)
                if opened is not None:
                    _warn_of_lazy(traced.name, returned)
                return returned

    return cast(F, functools.update_wrapper(wrapper, function))


def _wrap_libraries() -> None:
    """Also of a process that is about to end, in which not everything can be imported any more."""
    try:
        http_patching.install()
        thread_patching.install()
    except Exception as error:  # the agent runs all the same
        if is_of_signal_handler(error):
            raise
        _log.warning("tracegrad cannot wrap every library", exc_info=True)


_no_telemetry = False  # OpenTelemetry cannot be imported


def _span(name: str, url: str, *, root: bool = False) -> AbstractContextManager[None]:
    global _no_telemetry
    if not _no_telemetry:
        try:
            # OpenTelemetry is loaded with the first rollout, not on import
            from tracegrad.telemetry import SpanScope

            return SpanScope(name, url, root=root)
        except Exception as error:  # a setting in OTEL_... that it refuses; the agent runs anyhow
            if is_of_signal_handler(error):
                raise
            _no_telemetry = True  # another attempt would cost as much as the first
            _log.warning("tracegrad records no spans", exc_info=True)
    exporter.exporter(url).drop("span_failed")
    return nullcontext()


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
