"""A conversation in the words of each dialect: requests, whole answers, streams.

Plain HTTP, without the vendors' libraries: these wait, retry and read in ways of their own, and
what is measured here is the proxy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Json = dict[str, Any]
MODEL = "policy"
MAX_TOKENS = 32


def _function(name: str, description: str) -> Json:
    properties = {"item": {"type": "string"}, "city": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters}


# Two of the shop's own: the model knows how to call them.
FUNCTIONS: Sequence[Json] = (
    _function("stock", "units on hand"),
    _function("price", "price today"),
)


class WrongAnswer(ValueError):
    """An answer that is none, or a stream that ended before its end."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str  # JSON, as far as the model wrote it

    @property
    def parsed(self) -> Json:
        """{} where it is no object: replies are cut at MAX_TOKENS."""
        try:
            found = json.loads(self.arguments)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Reply:
    answer_id: str
    text: str
    calls: tuple[ToolCall, ...]
    tokens: int  # sampled, as the answer says


@dataclass(slots=True)
class Conversation:
    """`messages`: a user's text, a reply of the model, or the result of each of its calls.
    `instructions` come before them all; `max_tokens`: of the next reply."""

    tools: bool
    by_reference: bool = False  # earlier messages are named by the answer's id, where that can be
    messages: list[str | Reply | list[str]] = field(default_factory=list)
    instructions: str = ""
    max_tokens: int = MAX_TOKENS

    @property
    def last_reply(self) -> Reply | None:
        return next((one for one in self.messages[::-1] if isinstance(one, Reply)), None)


class StreamReader(Protocol):
    def feed(self, event: Json) -> bool:
        """Whether it brought something of the reply."""
        ...

    def reply(self, *, done: bool) -> Reply:
        """`done`: `[DONE]` has come. Raises WrongAnswer: the stream has not reached its end."""
        ...


class Dialect(Protocol):
    name: str

    def path(self, *, stream: bool) -> str: ...
    def body(self, conversation: Conversation, *, stream: bool) -> Json: ...
    def whole(self, answer: Json) -> Reply: ...
    def stream(self) -> StreamReader: ...
    def malformed(self) -> Sequence[Json]:
        """Bodies that are answered with a 4xx."""
        ...


TOO_LONG = "lamp " * 4000


class Chat:
    name = "chat"

    def path(self, *, stream: bool) -> str:
        return "/v1/chat/completions"

    def body(self, conversation: Conversation, *, stream: bool) -> Json:
        body: Json = {
            "model": MODEL,
            "messages": self._messages(conversation),
            "max_tokens": conversation.max_tokens,
        }
        if conversation.tools:
            body["tools"] = [{"type": "function", "function": one} for one in FUNCTIONS]
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _messages(self, conversation: Conversation) -> list[Json]:
        written: list[Json] = []
        if conversation.instructions:
            written.append({"role": "system", "content": conversation.instructions})
        calls: tuple[ToolCall, ...] = ()
        for message in conversation.messages:
            if isinstance(message, str):
                written.append({"role": "user", "content": message})
            elif isinstance(message, Reply):
                calls = message.calls
                written.append(self._assistant(message))
            else:
                written += [
                    {"role": "tool", "tool_call_id": call.call_id, "content": result}
                    for call, result in zip(calls, message, strict=True)
                ]
        return written

    def _assistant(self, reply: Reply) -> Json:
        message: Json = {"role": "assistant", "content": reply.text}
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in reply.calls
            ]
        return message

    def whole(self, answer: Json) -> Reply:
        [choice] = answer["choices"]
        message = choice["message"]
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        )
        tokens = answer["usage"]["completion_tokens"]
        return Reply(answer["id"], message["content"] or "", calls, tokens)

    def stream(self) -> StreamReader:
        return _ChatStream()

    def malformed(self) -> Sequence[Json]:
        user = {"role": "user", "content": "hi"}
        return (
            {"model": MODEL},
            {"model": MODEL, "messages": "hi"},
            {"model": MODEL, "messages": [user], "temperature": "warm"},
            {"model": MODEL, "messages": [{"role": "user", "content": TOO_LONG}]},
        )


class _ChatStream:
    def __init__(self) -> None:
        self._answer_id, self._text, self._tokens, self._finished = "", "", 0, False
        self._calls: dict[int, list[str]] = {}

    def feed(self, event: Json) -> bool:
        self._answer_id = event["id"]
        self._tokens = (event.get("usage") or {}).get("completion_tokens", self._tokens)
        came = False
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            self._text += delta.get("content") or ""
            came |= bool(delta.get("content") or delta.get("tool_calls"))
            self._finished |= choice.get("finish_reason") is not None
            for part in delta.get("tool_calls") or ():
                call = self._calls.setdefault(part["index"], ["", "", ""])
                function = part.get("function") or {}
                for at, piece in enumerate(
                    (part.get("id"), function.get("name"), function.get("arguments"))
                ):
                    call[at] += piece or ""
        return came

    def reply(self, *, done: bool) -> Reply:
        if not (done and self._finished):
            raise WrongAnswer("a stream without its end")
        calls = tuple(ToolCall(*call) for _, call in sorted(self._calls.items()))
        return Reply(self._answer_id, self._text, calls, self._tokens)


class Completions:
    """Texts have no roles and no tools: a conversation is one text that grows."""

    name = "completions"

    def path(self, *, stream: bool) -> str:
        return "/v1/completions"

    def body(self, conversation: Conversation, *, stream: bool) -> Json:
        parts = [each.text if isinstance(each, Reply) else each for each in conversation.messages]
        text = "".join(part for part in parts if isinstance(part, str))
        body: Json = {
            "model": MODEL,
            "prompt": conversation.instructions + text,
            "max_tokens": conversation.max_tokens,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def whole(self, answer: Json) -> Reply:
        [choice] = answer["choices"]
        return Reply(answer["id"], choice["text"], (), answer["usage"]["completion_tokens"])

    def stream(self) -> StreamReader:
        return _ChatStream()

    def malformed(self) -> Sequence[Json]:
        return (
            {"model": MODEL},
            {"model": MODEL, "prompt": "hi", "max_tokens": "many"},
            {"model": MODEL, "prompt": TOO_LONG},
        )


class Responses:
    name = "responses"

    def path(self, *, stream: bool) -> str:
        return "/v1/responses"

    def body(self, conversation: Conversation, *, stream: bool) -> Json:
        body: Json = {
            "model": MODEL,
            "max_output_tokens": conversation.max_tokens,
            "stream": stream,
        }
        if conversation.instructions:
            body["instructions"] = conversation.instructions
        messages: Sequence[str | Reply | list[str]] = conversation.messages
        last = conversation.last_reply
        calls: tuple[ToolCall, ...] = ()
        if conversation.by_reference and last is not None:
            body["previous_response_id"] = last.answer_id
            calls = last.calls
            messages = messages[messages.index(last) + 1 :]
        body["input"] = self._items(messages, calls)
        if conversation.tools:
            body["tools"] = [{"type": "function", **function} for function in FUNCTIONS]
        return body

    def _items(
        self, messages: Sequence[str | Reply | list[str]], calls: tuple[ToolCall, ...]
    ) -> list[Json]:
        items: list[Json] = []
        for message in messages:
            if isinstance(message, str):
                items.append({"role": "user", "content": message})
            elif isinstance(message, Reply):
                calls = message.calls
                if message.text or not calls:
                    items.append({"role": "assistant", "content": message.text})
                items += [
                    {
                        "type": "function_call",
                        "call_id": call.call_id,
                        "name": call.name,
                        "arguments": call.arguments,
                    }
                    for call in calls
                ]
            else:
                items += [
                    {"type": "function_call_output", "call_id": call.call_id, "output": result}
                    for call, result in zip(calls, message, strict=True)
                ]
        return items

    def whole(self, answer: Json) -> Reply:
        text, calls = "", []
        for item in answer["output"]:
            if item["type"] == "function_call":
                calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
            elif item["type"] == "message":
                text += "".join(part.get("text", "") for part in item["content"])
        return Reply(answer["id"], text, tuple(calls), answer["usage"]["output_tokens"])

    def stream(self) -> StreamReader:
        return _ResponsesStream(self)

    def malformed(self) -> Sequence[Json]:
        return (
            {"model": MODEL, "input": 7},
            {"model": MODEL, "input": "hi", "previous_response_id": "resp_none"},
            {"model": MODEL, "input": TOO_LONG},
        )


class _ResponsesStream:
    def __init__(self, dialect: Responses) -> None:
        self._dialect = dialect
        self._whole: Json | None = None

    def feed(self, event: Json) -> bool:
        if event["type"] in ("response.completed", "response.incomplete"):
            self._whole = event["response"]
        return str(event["type"]).endswith(".delta")

    def reply(self, *, done: bool) -> Reply:
        if self._whole is None:
            raise WrongAnswer("a stream without its end")
        return self._dialect.whole(self._whole)


class Anthropic:
    name = "anthropic"

    def path(self, *, stream: bool) -> str:
        return "/v1/messages"

    def body(self, conversation: Conversation, *, stream: bool) -> Json:
        body: Json = {
            "model": MODEL,
            "max_tokens": conversation.max_tokens,
            "messages": self._messages(conversation),
            "stream": stream,
        }
        if conversation.instructions:
            body["system"] = conversation.instructions
        if conversation.tools:
            body["tools"] = [
                {
                    "name": function["name"],
                    "description": function["description"],
                    "input_schema": function["parameters"],
                }
                for function in FUNCTIONS
            ]
        return body

    def _messages(self, conversation: Conversation) -> list[Json]:
        written: list[Json] = []
        calls: tuple[ToolCall, ...] = ()
        for message in conversation.messages:
            if isinstance(message, str):
                written.append({"role": "user", "content": message})
            elif isinstance(message, Reply):
                calls = message.calls
                blocks: list[Json] = [{"type": "text", "text": message.text}]
                blocks = blocks if message.text or not calls else []
                blocks += [
                    {
                        "type": "tool_use",
                        "id": call.call_id,
                        "name": call.name,
                        "input": call.parsed,
                    }
                    for call in calls
                ]
                written.append({"role": "assistant", "content": blocks})
            else:
                results = [
                    {"type": "tool_result", "tool_use_id": call.call_id, "content": result}
                    for call, result in zip(calls, message, strict=True)
                ]
                written.append({"role": "user", "content": results})
        return written

    def whole(self, answer: Json) -> Reply:
        text, calls = "", []
        for block in answer["content"]:
            if block["type"] == "tool_use":
                calls.append(ToolCall(block["id"], block["name"], json.dumps(block["input"])))
            else:
                text += block.get("text", "")
        return Reply(answer["id"], text, tuple(calls), answer["usage"]["output_tokens"])

    def stream(self) -> StreamReader:
        return _AnthropicStream()

    def malformed(self) -> Sequence[Json]:
        user = {"role": "user", "content": "hi"}
        return (
            {"model": MODEL, "messages": [user]},
            {"model": MODEL, "max_tokens": 9, "messages": [{"role": "king", "content": "hi"}]},
            {"model": MODEL, "max_tokens": 9, "messages": [{**user, "content": TOO_LONG}]},
        )


class _AnthropicStream:
    def __init__(self) -> None:
        self._answer_id, self._text, self._tokens, self._stopped = "", "", 0, False
        self._calls: dict[int, list[str]] = {}

    def feed(self, event: Json) -> bool:
        kind = event["type"]
        if kind == "message_start":
            self._answer_id = event["message"]["id"]
        elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block = event["content_block"]
            self._calls[event["index"]] = [block["id"], block["name"], ""]
        elif kind == "content_block_delta":
            delta = event["delta"]
            self._text += delta.get("text", "")
            if "partial_json" in delta:
                self._calls[event["index"]][2] += delta["partial_json"]
            return True
        elif kind == "message_delta":
            self._tokens = event["usage"]["output_tokens"]
        elif kind == "message_stop":
            self._stopped = True
        elif kind == "error":
            raise WrongAnswer(f"an error in the stream: {event['error']['type']}")
        return False

    def reply(self, *, done: bool) -> Reply:
        if not self._stopped:
            raise WrongAnswer("a stream without its end")
        calls = tuple(ToolCall(*call) for _, call in sorted(self._calls.items()))
        return Reply(self._answer_id, self._text, calls, self._tokens)


class Gemini:
    name = "gemini"

    def path(self, *, stream: bool) -> str:
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"/v1beta/models/{MODEL}:{method}"

    def body(self, conversation: Conversation, *, stream: bool) -> Json:
        body: Json = {
            "contents": self._contents(conversation),
            "generationConfig": {"maxOutputTokens": conversation.max_tokens},
        }
        if conversation.instructions:
            body["systemInstruction"] = {"parts": [{"text": conversation.instructions}]}
        if conversation.tools:
            body["tools"] = [{"functionDeclarations": list(FUNCTIONS)}]
        return body

    def _contents(self, conversation: Conversation) -> list[Json]:
        written: list[Json] = []
        calls: tuple[ToolCall, ...] = ()
        for message in conversation.messages:
            if isinstance(message, str):
                written.append({"role": "user", "parts": [{"text": message}]})
            elif isinstance(message, Reply):
                calls = message.calls
                parts: list[Json] = [{"text": message.text}]
                parts = parts if message.text or not calls else []
                parts += [{"functionCall": _named(call, {"args": call.parsed})} for call in calls]
                written.append({"role": "model", "parts": parts})
            else:
                results = [
                    {"functionResponse": _named(call, {"response": {"result": result}})}
                    for call, result in zip(calls, message, strict=True)
                ]
                written.append({"role": "user", "parts": results})
        return written

    def whole(self, answer: Json) -> Reply:
        reader = _GeminiStream()
        reader.feed(answer)
        return reader.reply(done=True)

    def stream(self) -> StreamReader:
        return _GeminiStream()

    def malformed(self) -> Sequence[Json]:
        return (
            {"contents": 7},
            {"contents": [{"role": "user", "parts": [{"text": 7}]}]},
            {"contents": [{"role": "user", "parts": [{"text": TOO_LONG}]}]},
        )


def _named(call: ToolCall, rest: Mapping[str, Any]) -> Json:
    """Gemini's calls have an id where the model's have one."""
    return {"name": call.name, **rest} | ({"id": call.call_id} if call.call_id else {})


class _GeminiStream:
    def __init__(self) -> None:
        self._answer_id, self._text, self._tokens, self._finished = "", "", 0, False
        self._calls: list[ToolCall] = []

    def feed(self, event: Json) -> bool:
        if "error" in event:
            raise WrongAnswer(f"an error in the stream: {event['error']['status']}")
        self._answer_id = event.get("responseId", self._answer_id)
        self._tokens = event.get("usageMetadata", {}).get("candidatesTokenCount", self._tokens)
        came = False
        for candidate in event.get("candidates", ()):
            self._finished |= "finishReason" in candidate
            for part in candidate.get("content", {}).get("parts", ()):
                self._text += part.get("text", "")
                call = part.get("functionCall")
                came |= bool(part.get("text") or call)
                if call:
                    arguments = json.dumps(call.get("args", {}))
                    self._calls.append(ToolCall(call.get("id", ""), call["name"], arguments))
        return came

    def reply(self, *, done: bool) -> Reply:
        if not self._finished:
            raise WrongAnswer("a stream without its end")
        return Reply(self._answer_id, self._text, tuple(self._calls), self._tokens)


DIALECTS: Sequence[Dialect] = (Chat(), Completions(), Responses(), Anthropic(), Gemini())
