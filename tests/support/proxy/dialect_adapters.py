"""What a test of every dialect has to know of each: how a request is read, and the requests that
are mangled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from support.proxy.full_bodies import MOST
from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.anthropic import request as anthropic
from tracegrad.proxy.dialects.base import Dialect
from tracegrad.proxy.dialects.gemini import request as gemini
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.dialects.openai_completions import OpenAICompletionsDialect
from tracegrad.proxy.dialects.openai_responses.request import OpenAIResponsesDialect
from tracegrad.proxy.http.errors import BadRequest

Json = dict[str, Any]
Counts = Callable[[bytes], Call]

GEMINI_PATH = {"model": "m", "method": "streamGenerateContent"}
USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class DialectAdapter:
    """`full` has most of the dialect's fields, and is read as messages of these `roles`; `plain`
    has the least that it may. `counts` are the routes that only count a prompt's tokens.
    `names_param`: errors name the field beside the message."""

    dialect: Dialect
    full: Json
    plain: Json
    roles: str
    refusal: Json = field(default_factory=lambda: {"type": "invalid_request_error"})
    path: Mapping[str, str] = field(default_factory=dict)
    counts: Sequence[Counts] = ()
    names_param: bool = True

    def __str__(self) -> str:
        return self.dialect.name

    def parse(self, raw: bytes) -> Call | BadRequest:
        """A call that can be sent on, or the error, both checked."""
        try:
            call = self.dialect.parse(raw, self.path, {})
        except BadRequest as error:
            self._check(error)
            return error
        orjson.dumps(call.body)
        assert all(isinstance(message["role"], str) for message in call.messages)
        return call

    def _check(self, error: BadRequest) -> None:
        assert error.status == 400
        written = orjson.loads(self.dialect.error(error))["error"]
        assert {name: written[name] for name in self.refusal} == self.refusal
        if self.names_param:
            assert written["param"] == error.param


def _gemini_wrapped(raw: bytes) -> Call:
    """The other form in which a Gemini client has its prompt counted."""
    return gemini.count_request(b'{"generateContentRequest":' + raw + b"}", GEMINI_PATH)


_CHAT_PLAIN: Json = {"model": "m", "messages": [USER]}
CHAT = DialectAdapter(OpenAIChatDialect(), MOST["chat"], _CHAT_PLAIN, "system user assistant tool")
COMPLETIONS = DialectAdapter(
    OpenAICompletionsDialect(), MOST["completions"], {"model": "m", "prompt": "hi"}, ""
)
RESPONSES = DialectAdapter(
    OpenAIResponsesDialect(),
    MOST["responses"],
    {"model": "m", "input": "hi"},
    "system system user assistant tool tool",
)
ANTHROPIC = DialectAdapter(
    anthropic.AnthropicDialect(),
    MOST["messages"],
    {**_CHAT_PLAIN, "max_tokens": 9},
    "system user assistant tool user system tool",
    counts=(lambda raw: anthropic.count_request(raw, {}),),
    names_param=False,
)
GEMINI = DialectAdapter(
    gemini.GeminiDialect(),
    MOST["gemini"],
    {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "system user assistant tool tool user",
    refusal={"status": "INVALID_ARGUMENT"},
    path=GEMINI_PATH,
    counts=(lambda raw: gemini.count_request(raw, GEMINI_PATH), _gemini_wrapped),
    names_param=False,
)
EVERY_DIALECT = [CHAT, COMPLETIONS, RESPONSES, ANTHROPIC, GEMINI]
