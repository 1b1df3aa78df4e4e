"""`tracegrad.instrument()`: turns on the spans of the agent frameworks that are installed.

Where OpenInference or OpenTelemetry has an instrumentor, that is turned on; where a framework makes
spans itself, they are read. A framework is found by its distribution, without an import; an
instrumentor imports the framework that it is for.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tracegrad import context
from tracegrad.ag2_spans import hand_to_agents
from tracegrad.frameworks import FRAMEWORKS, Framework, by_name
from tracegrad.openai_agents_traces import exports_to_its_vendor
from tracegrad.serializer import error_line
from tracegrad.signal_errors import is_of_signal_handler

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

_log = logging.getLogger("tracegrad")

GROUP = "opentelemetry_instrumentor"
# OpenTelemetry's own list of what is not to be instrumented: names of entry points.
_DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
_MAX_ERROR_CHARS = 300
_said: set[str] = set()


def instrument(*names: str) -> list[str]:
    """Turns on the spans of the installed agent frameworks, so that a rollout has its agents' and
    tools' spans around its LLM calls.

    Spans go through the tracer provider that the process has, and those of rollouts also to the
    proxy. Strands, AG2, Agent Framework and (without OpenInference) ADK know no other than the
    process's: where it has none when the first rollout begins, it gets one that only the proxy
    hears. A server of MCP, which opens no rollout, gets it here (`instrument("mcp")`).

    Whatever goes wrong with a framework or with its instrumentor is a warning, once, with what to
    do about it. Calling it again does nothing more.

    Args:
        names: of the frameworks; none: all that are installed. Each takes as long as its import:
            where several are installed, and one is used, name it.

    Returns:
        The names of those that make spans of agents now, whoever turned them on. MCP is none: it
        carries the context of other spans.

    Raises:
        ValueError: a name that is no framework's; or TRACEGRAD_URL is not what it must be.
    """
    url = context.proxy_url()
    known = by_name()
    for name in names:
        if name not in known:
            raise ValueError(
                f"instrument({name!r}): no framework that is known here; give one of"
                f" {', '.join(sorted(known))}, or none for all that are installed"
            )
    wanted = list(dict.fromkeys(known[name] for name in names)) or installed_frameworks()
    turned_on = turn_on(wanted, url, named=bool(names))
    return [each.name for each in turned_on if not each.is_addon]


def turn_on(wanted: Iterable[Framework], url: str, *, named: bool) -> list[Framework]:
    """Those that are on now; of the others a warning says why. `named`: somebody asked for them,
    and not for what is installed."""
    wanted = list(wanted)
    on = [each for each in wanted if _guarded(each, url, named=named)]
    for each in wanted:
        _say_what_it_reports(each)
    makes_spans = any(not each.is_addon for each in on)
    if makes_spans and (os.environ.get("OTEL_SDK_DISABLED") or "").strip().lower() == "true":
        warn_once("OTEL_SDK_DISABLED=true turns all spans of OpenTelemetry off: unset it")
    return on


def is_installed(framework: Framework) -> bool:
    return _find(framework.packages) is not None


def installed_frameworks() -> list[Framework]:
    """What is turned on where none is named."""
    installed = [each for each in FRAMEWORKS if is_installed(each)]
    # A framework's spans say what those of the client below it would say, and more.
    addons = [each for each in installed if each.is_addon]
    clients = [each for each in installed if each.is_client]
    frameworks = [each for each in installed if not (each.is_addon or each.is_client)]
    return (frameworks or clients) + addons


def _guarded(framework: Framework, url: str, *, named: bool) -> bool:
    try:
        return _turn_on(framework, url, named=named)
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        warn_once(
            f"{framework.title} could not be instrumented: {error_line(error, _MAX_ERROR_CHARS)}."
            " Its LLM calls are recorded all the same; leave it out by naming the others, or"
            " install other versions"
        )
        return False


def _turn_on(framework: Framework, url: str, *, named: bool) -> bool:
    installed = _find(framework.packages)
    if installed is None:
        warn_once(
            f"instrument({framework.name!r}): {framework.title} is not installed here:"
            f" pip install {framework.packages[0]}"
        )
        return False
    native = framework.native and _major(installed) >= framework.native_from
    found = [] if native and framework.native_from else list(_instrumentors(framework))
    if found:
        on = _use_instrumentor(framework, installed, found, url)
    elif native:
        _use_native(framework, url, named=named)
        on = True
    else:
        if named or not (framework.is_client or framework.is_addon):
            _say_what_is_missing(framework)
        on = False
    if on:
        _say_what_silences(framework)
    return on


def _use_instrumentor(
    framework: Framework,
    installed: Distribution,
    found: list[tuple[Distribution, EntryPoint]],
    url: str,
) -> bool:
    """One of several: two would say each call twice."""
    from tracegrad.telemetry import FollowingTracerProvider

    for _, entry in found:
        if entry.module in sys.modules and entry.load()().is_instrumented_by_opentelemetry:
            return True  # by us, or by the agent itself
    package, entry = found[0]
    try:
        instrumentor = entry.load()()
        instrumentor.instrument(
            tracer_provider=FollowingTracerProvider(url), raise_exception_on_conflict=True
        )
        on = bool(instrumentor.is_instrumented_by_opentelemetry)
        why = "it did not say why" if not on else ""
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        on, why = False, error_line(error, _MAX_ERROR_CHARS)
    if not on:
        name = package.metadata["Name"]
        warn_once(
            f"{name} {package.version} does not work with {framework.title} {installed.version}:"
            f" {why}. Try pip install -U {name} {framework.packages[0]}; LLM calls are recorded all"
            " the same"
        )
    return on


def _use_native(framework: Framework, url: str, *, named: bool) -> None:
    from tracegrad import telemetry

    if framework.needs_global:
        telemetry.make_global_with_first_rollout()
    if framework.is_addon and named:  # else it is a client's part, and a rollout is around it
        telemetry.serve(url)
    if switch := _SWITCHES.get(framework.name):
        switch(telemetry.FollowingTracerProvider(url))


def _switch_pydantic_ai(provider: Any) -> None:
    from pydantic_ai import Agent, InstrumentationSettings  # type: ignore[import-not-found]

    # Its own switch; what the agent has set before is the agent's.
    if not Agent._instrument_default:
        Agent.instrument_all(InstrumentationSettings(tracer_provider=provider))


def _switch_agent_framework(provider: Any) -> None:
    from agent_framework import observability  # type: ignore[import-not-found]

    observability.enable_instrumentation()


# Strands and ADK look for the process's provider, and need no switch.
_SWITCHES: dict[str, Callable[[Any], None]] = {
    "ag2": hand_to_agents,
    "pydantic-ai": _switch_pydantic_ai,
    "agent-framework": _switch_agent_framework,
}


def _say_what_is_missing(framework: Framework) -> None:
    makes, calls = "makes spans of it", ". Its LLM calls are recorded all the same"
    if framework.is_addon:
        makes, calls = "carries the context of spans through it", ""
    warn_once(
        f"{framework.title} is installed, and nothing that {makes}: pip install"
        f" {framework.instrumentors[0]}{calls}"
    )


def _say_what_silences(framework: Framework) -> None:
    for variable, values in framework.silenced_by:
        if _is_set(variable, values):
            warn_once(
                f"{variable}={os.environ[variable]} turns all spans of {framework.title} off:"
                " unset it"
            )


def _say_what_it_reports(framework: Framework) -> None:
    """With spans or without: an instrumentor that is missing keeps no framework from reporting."""
    if _find(framework.packages) is None:
        return
    for report in framework.reports:
        off = any(_is_set(variable, values) for variable, values in report.unless)
        still = _STILL_REPORTS.get(framework.name, lambda: True)
        if not off and still():
            warn_once(f"{framework.title} sends {report.what} to its vendor: {report.remedy}")


# What the environment does not say: somebody may have taken the exporter away.
_STILL_REPORTS: dict[str, Callable[[], bool]] = {"openai-agents": exports_to_its_vendor}


def _is_set(variable: str, values: Iterable[str]) -> bool:
    return (os.environ.get(variable) or "").strip().lower() in values


def _instrumentors(framework: Framework) -> Iterator[tuple[Distribution, EntryPoint]]:
    """Those that are installed, the one to take first."""
    disabled = {each.strip() for each in os.environ.get(_DISABLED, "").split(",")}
    for name in framework.instrumentors:
        if (package := _find([name])) is not None:
            for entry in package.entry_points:
                if entry.group == GROUP and entry.name not in disabled:
                    yield package, entry


def _find(names: Iterable[str]) -> Distribution | None:
    from importlib.metadata import PackageNotFoundError, distribution  # not of every agent's start

    for name in names:
        try:
            return distribution(name)
        except PackageNotFoundError:
            continue
    return None


def _major(package: Distribution) -> int:
    digits = package.version.split(".")[0]
    return int(digits) if digits.isdecimal() else 0


def warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)
