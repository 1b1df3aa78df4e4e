"""Spans of AG2 from 1.0 on, by its own `TelemetryMiddleware`.

Only agents that are handed it make spans, and AG2 has no setting, default or hook that hands it to
all of them; nor has anybody an instrumentor. So each agent gets it where it is made, by AG2's
public methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tracegrad.http_patching import replace_method
from tracegrad.serializer import error_line
from tracegrad.signal_errors import is_of_signal_handler

_MAX_ERROR_CHARS = 300
_log = logging.getLogger("tracegrad")
_said = False


def hand_to_agents(provider: Any) -> None:
    """Agents that are made from now on make spans, which go to `provider`. One that the program
    has given a `TelemetryMiddleware` keeps that alone."""
    import ag2  # type: ignore[import-not-found]
    from ag2.middleware import TelemetryMiddleware  # type: ignore[import-not-found]

    def wrap(make: Callable[..., None]) -> Callable[..., None]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            try:
                if not any(
                    isinstance(each.middleware, TelemetryMiddleware) for each in self.middleware
                ):
                    spans = TelemetryMiddleware(agent_name=self.name, tracer_provider=provider)
                    self.insert_middleware(spans)  # around whatever else it has
            except Exception as error:  # an agent without spans is an agent
                if is_of_signal_handler(error):
                    raise
                _say_once(error)

        return wrapped

    replace_method(ag2, "Agent", "__init__", wrap)


def _say_once(error: Exception) -> None:
    global _said
    if not _said:
        _said = True
        _log.warning(
            "agents of AG2 make no spans: %s. Their calls are recorded all the same; hand them"
            " ag2.middleware.TelemetryMiddleware, or install another ag2",
            error_line(error, _MAX_ERROR_CHARS),
        )
