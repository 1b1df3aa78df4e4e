"""Calls that never came here: told by spans, which are read as chat completions (`genai`)."""

from __future__ import annotations

from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect


class OtelDialect(OpenAIChatDialect):
    name = "otel"
