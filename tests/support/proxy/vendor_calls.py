"""The same call in every dialect that a vendor's own client library speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import anthropic
import openai

from support.engines.mock_engine import MODEL
from support.proxy.proxy_with_engine import ProxyWithEngine

Json = dict[str, Any]

PROMPT = "How is it?"
MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class Vendor:
    """`create` is the method of a client, sync or async; `text` reads its whole answer, `delta`
    an event of its stream, "" where that says nothing."""

    name: str
    library: ModuleType
    create: Callable[[Any], Callable[..., Any]]
    args: Json
    text: Callable[[Any], str]
    delta: Callable[[Any], str]

    def __str__(self) -> str:
        return self.name

    def client(self, rig: ProxyWithEngine, **options: Any) -> Any:
        """Of the rig's rollout, for `with`; a call is sent once."""
        return self._made(self._class("OpenAI", "Anthropic"), rig, options)

    def async_client(self, rig: ProxyWithEngine, **options: Any) -> Any:
        return self._made(self._class("AsyncOpenAI", "AsyncAnthropic"), rig, options)

    def streamed(self, client: Any, args: Json) -> Any:
        """What the library's streaming helper makes of a stream: a whole answer."""
        if self.name == "chat":
            with client.chat.completions.stream(**args) as events:
                return events.get_final_completion()
        if self.name == "responses":
            with client.responses.stream(**args) as events:
                # The helper's own final response is that of `response.completed` alone.
                return list(events)[-1].response
        with client.messages.stream(**args) as events:
            return events.get_final_message()

    def _class(self, of_openai: str, of_anthropic: str) -> Any:
        name = of_openai if self.library is openai else of_anthropic
        return getattr(self.library, name)

    def _made(self, kind: Any, rig: ProxyWithEngine, options: Json) -> Any:
        base = rig.base + ("/v1" if self.library is openai else "")
        own = {"base_url": base, "api_key": "any", "max_retries": 0, "timeout": 20}
        return kind(**own | options)

    def error(self, status: int) -> type[Exception]:
        """What the library raises for an answer of this status."""
        special = _OPENAI if self.library is openai else _ANTHROPIC
        name = special.get(status, "InternalServerError" if status >= 500 else "APIStatusError")
        found: type[Exception] = getattr(self.library, name)
        return found


_OPENAI = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}
_ANTHROPIC = _OPENAI | {
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
    504: "DeadlineExceededError",
    529: "OverloadedError",
}


def _first(choices: Any, part: str) -> str:
    return getattr(choices[0], part).content or "" if choices else ""


CHAT = Vendor(
    "chat",
    openai,
    lambda client: client.chat.completions.create,
    {"model": MODEL, "messages": MESSAGES},
    lambda answer: _first(answer.choices, "message"),
    lambda chunk: _first(chunk.choices, "delta"),
)
COMPLETIONS = Vendor(
    "completions",
    openai,
    lambda client: client.completions.create,
    {"model": MODEL, "prompt": PROMPT},
    lambda answer: answer.choices[0].text,
    lambda chunk: chunk.choices[0].text if chunk.choices else "",
)
RESPONSES = Vendor(
    "responses",
    openai,
    lambda client: client.responses.create,
    {"model": MODEL, "input": PROMPT},
    lambda answer: answer.output_text,
    lambda event: event.delta if event.type == "response.output_text.delta" else "",
)
CLAUDE = Vendor(
    "messages",
    anthropic,
    lambda client: client.messages.create,
    {"model": MODEL, "max_tokens": 4096, "messages": MESSAGES},
    lambda answer: "".join(block.text for block in answer.content if block.type == "text"),
    lambda event: getattr(getattr(event, "delta", None), "text", ""),
)
CHATTING = [CHAT, RESPONSES, CLAUDE]
VENDORS = [CHAT, COMPLETIONS, RESPONSES, CLAUDE]
