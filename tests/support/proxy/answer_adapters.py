"""What a test of every dialect's answers has to know of each: a call, the vendor's client that
reads an answer, and what that client sends back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import anthropic
import httpx
import httpx2
import openai
import orjson
from anthropic.types import Message
from google import genai
from google.genai import errors as gemini_errors
from google.genai import types as gemini_types
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from support.engines.engine_answers import Said, streamed, whole
from support.proxy.dialect_adapters import (
    ANTHROPIC,
    CHAT,
    GEMINI,
    RESPONSES,
    USER,
    DialectAdapter,
)
from support.proxy.gemini_requests import HI
from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.base import StreamWriter

Json = dict[str, Any]
EVENT_STREAM = {"content-type": "text/event-stream"}


class VendorClient(Protocol):
    """The vendor's package with `data` as whatever a server answers."""

    raised: type[Exception]  # for an error amid a stream

    def check(self, body: Json) -> None:
        """Raises where a whole answer is not of the vendor's types."""
        ...

    def read(self, data: bytes) -> Json:
        """A stream, as the whole answer that the client makes of it."""
        ...

    async def read_async(self, data: bytes) -> Json: ...


class Pieces(
    httpx.SyncByteStream, httpx.AsyncByteStream, httpx2.SyncByteStream, httpx2.AsyncByteStream
):
    """A body that comes in pieces which end anywhere."""

    def __init__(self, data: bytes) -> None:
        self.pieces = [data[start : start + 50] for start in range(0, len(data), 50)]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.pieces)

    async def __aiter__(self) -> Any:
        for piece in self.pieces:
            yield piece


def serve(data: bytes, status: int = 200) -> httpx2.MockTransport:
    """For the clients of OpenAI and Anthropic."""
    headers = EVENT_STREAM if status == 200 else {"content-type": "application/json"}
    return httpx2.MockTransport(
        lambda _: httpx2.Response(status, headers=headers, stream=Pieces(data))
    )


class OpenAIChatClient:
    raised = openai.APIError
    asked: ClassVar[Any] = {"model": "m", "messages": [USER]}

    def check(self, body: Json) -> None:
        ChatCompletion.model_validate(body)

    def read(self, data: bytes) -> Json:
        with self.client(data).chat.completions.stream(**self.asked) as events:
            return events.get_final_completion().to_dict(mode="json")

    async def read_async(self, data: bytes) -> Json:
        http = httpx2.AsyncClient(transport=serve(data))
        async with (
            openai.AsyncOpenAI(api_key="k", max_retries=0, http_client=http) as client,
            client.chat.completions.stream(**self.asked) as events,
        ):
            return (await events.get_final_completion()).to_dict(mode="json")

    def client(self, data: bytes) -> openai.OpenAI:
        http = httpx2.Client(transport=serve(data))
        return openai.OpenAI(api_key="k", max_retries=0, http_client=http)


class OpenAIResponsesClient(OpenAIChatClient):
    asked: ClassVar[Any] = {"model": "m", "input": "hi"}

    def check(self, body: Json) -> None:
        Response.model_validate(body)

    def read(self, data: bytes) -> Json:
        with self.client(data).responses.stream(**self.asked) as events:
            return events.get_final_response().to_dict(mode="json")

    async def read_async(self, data: bytes) -> Json:
        http = httpx2.AsyncClient(transport=serve(data))
        async with (
            openai.AsyncOpenAI(api_key="k", max_retries=0, http_client=http) as client,
            client.responses.stream(**self.asked) as events,
        ):
            return (await events.get_final_response()).to_dict(mode="json")


class AnthropicClient:
    raised = anthropic.APIStatusError
    asked: ClassVar[Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}

    def check(self, body: Json) -> None:
        Message.model_validate(body)

    def read(self, data: bytes) -> Json:
        with self.client(serve(data)).messages.stream(**self.asked) as events:
            message = events.get_final_message()
        Message.model_validate(message.model_dump())
        return message.to_dict()

    async def read_async(self, data: bytes) -> Json:
        http = httpx2.AsyncClient(transport=serve(data))
        async with (
            anthropic.AsyncAnthropic(api_key="k", max_retries=0, http_client=http) as client,
            client.messages.stream(**self.asked) as events,
        ):
            return (await events.get_final_message()).to_dict()

    def client(self, transport: httpx2.MockTransport) -> anthropic.Anthropic:
        http = httpx2.Client(transport=transport)
        return anthropic.Anthropic(api_key="k", max_retries=0, http_client=http)


class GeminiClient:
    raised = gemini_errors.APIError

    def check(self, body: Json) -> None:
        gemini_types.GenerateContentResponse.model_validate(body)

    def read(self, data: bytes) -> Json:
        models = self.client(data).models
        return self._joined(list(models.generate_content_stream(model="m", contents="hi")))

    async def read_async(self, data: bytes) -> Json:
        models = self.client(data).aio.models
        stream = await models.generate_content_stream(model="m", contents="hi")
        return self._joined([each async for each in stream])

    def client(self, data: bytes, status: int = 200) -> genai.Client:
        headers = {"content-type": "application/json"}

        def respond(_: httpx.Request) -> httpx.Response:
            return httpx.Response(status, headers=headers, stream=Pieces(data))

        transport = httpx.MockTransport(respond)
        options = gemini_types.HttpOptions(
            httpx_client=httpx.Client(transport=transport),
            httpx_async_client=httpx.AsyncClient(transport=transport),
        )
        return genai.Client(api_key="k", http_options=options)

    def _joined(self, chunks: list[gemini_types.GenerateContentResponse]) -> Json:
        """One candidate of all parts: Google's client leaves joining them to its callers."""
        parts: list[Json] = []
        for each in chunks:
            body = each.model_dump(mode="json", by_alias=True, exclude_none=True)
            parts += body["candidates"][0]["content"].get("parts", [])
        return {"candidates": [{"content": {"role": "model", "parts": parts}}]}


@dataclass(frozen=True)
class AnswerAdapter:
    """`fields` ask for all that an answer may have, reasoning too. `echo` makes, of a whole answer,
    the fields of the request that an agent sends next, its second message the answer."""

    request: DialectAdapter
    client: VendorClient
    echo: Callable[[Json], Json]
    arguments: Callable[[Json], Any]  # of the one tool call of a whole answer
    fields: Json
    # Tool calls carry their arguments as an object instead of as text.
    has_objects: bool = False
    streamed_by_path: bool = False

    def __str__(self) -> str:
        return str(self.request)

    def call(self, **fields: Any) -> Call:
        asked = self.request.plain | self.fields | fields
        return self.request.dialect.parse(orjson.dumps(asked), self.request.path, {"alt": "sse"})

    def answer(self, one: Said) -> Json:
        body: Json = orjson.loads(self.request.dialect.answer(self.call(), whole(one)))
        self.client.check(body)
        return body

    def writer(self) -> StreamWriter:
        call = self.call() if self.streamed_by_path else self.call(stream=True)
        return self.request.dialect.writer(call)

    def stream(self, one: Said, size: int = 4) -> bytes:
        """With keepalives wherever they may come."""
        writer = self.writer()
        going_on, ending = streamed(one, size=size)
        begun = writer.keepalive() + writer.begin(one.prompt_tokens)
        pieces = [writer.chunk(each) + writer.keepalive() for each in going_on]
        return begun + b"".join(pieces) + writer.end(ending)

    def message(self, body: Json) -> Json:
        """The canonical message that a client's echo of a whole answer becomes."""
        return self.call(**self.echo(body)).messages[1]


CHAT_ANSWERS = AnswerAdapter(
    CHAT,
    OpenAIChatClient(),
    lambda body: {"messages": [USER, body["choices"][0]["message"], USER]},
    lambda body: body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
    fields={},
)
RESPONSES_ANSWERS = AnswerAdapter(
    RESPONSES,
    OpenAIResponsesClient(),
    lambda body: {"input": [USER, *body["output"], USER]},
    lambda body: body["output"][0]["arguments"],
    fields={"include": ["reasoning.encrypted_content"], "store": False},
)
ANTHROPIC_ANSWERS = AnswerAdapter(
    ANTHROPIC,
    AnthropicClient(),
    lambda body: {
        "messages": [USER, {"role": "assistant", "content": body["content"]}, USER],
    },
    lambda body: body["content"][0]["input"],
    fields={},
    has_objects=True,
)
GEMINI_ANSWERS = AnswerAdapter(
    GEMINI,
    GeminiClient(),
    lambda body: {"contents": [HI, body["candidates"][0]["content"], HI]},
    lambda body: body["candidates"][0]["content"]["parts"][0]["functionCall"]["args"],
    fields={"generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
    has_objects=True,
    streamed_by_path=True,
)
EVERY_ANSWER = [CHAT_ANSWERS, RESPONSES_ANSWERS, ANTHROPIC_ANSWERS, GEMINI_ANSWERS]
