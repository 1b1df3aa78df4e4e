"""Whether OpenAI's Agents SDK sends its traces to OpenAI, as it does by default.

Its public interface replaces processors, and does not list them; so its own lists are read here.
"""

from __future__ import annotations

import sys
from typing import Any

from tracegrad.signal_errors import is_of_signal_handler


def exports_to_its_vendor() -> bool:
    """As far as this process has set it up, without the variables of its environment. It imports
    nothing. Where another version keeps its lists elsewhere: True, since that is its default."""
    setup = sys.modules.get("agents.tracing.setup")
    provider = getattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    if provider is None:
        return True  # made at its first trace, with the exporter
    if type(provider).__module__ != "agents.tracing.provider":
        return False  # the agent's own
    try:
        if provider._manual_disabled:  # set_tracing_disabled(True)
            return False
        return any(map(_is_exporter, provider._multi_processor._processors))
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        return True


def _is_exporter(processor: Any) -> bool:
    exporter = getattr(processor, "_exporter", None)
    return type(exporter).__name__ == "BackendSpanExporter"
