"""Every dialect by the name that is stored with its turns."""

from __future__ import annotations

from tracegrad.chat.call import Call
from tracegrad.events import Turn
from tracegrad.jsonutil import dump_json
from tracegrad.proxy.dialects.anthropic.request import AnthropicDialect
from tracegrad.proxy.dialects.base import Dialect
from tracegrad.proxy.dialects.gemini.request import WHOLE, GeminiDialect
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.dialects.openai_completions import OpenAICompletionsDialect
from tracegrad.proxy.dialects.openai_responses.request import OpenAIResponsesDialect
from tracegrad.proxy.http.errors import ApiError


class OtelDialect(OpenAIChatDialect):
    name = "otel"


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        OpenAIChatDialect(),
        OpenAICompletionsDialect(),
        OpenAIResponsesDialect(),
        AnthropicDialect(),
        GeminiDialect(),
        OtelDialect(),
    )
}


def call_of(turn: Turn) -> Call | None:
    """The call that made the turn, read again from what was recorded of it.

    None without a recorded request, or for one that this version would refuse.
    """
    dialect = DIALECTS.get(turn.dialect)
    if dialect is None or turn.request is None:
        return None
    try:
        # Gemini's clients say in the path what others say in the body.
        path = {"model": turn.asked_model or turn.model, "method": WHOLE}
        return dialect.parse(dump_json(turn.request).encode(), path, {})
    except ApiError:
        return None
