"""An answer that the engine streams: recorded as it comes, and put together for those who want
it whole.

What ends the stream (chunks with a finish reason, usage) is kept back as `tail`: it goes out
after the commit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from tracegrad.chat.call import CHAT_PATH, Call
from tracegrad.events import Json, token_id_array
from tracegrad.proxy.engine.completion import (
    SampledCompletion,
    prompt_token_ids_of,
    tool_call_id,
)
from tracegrad.proxy.engine.fast_parse import extract_prompt
from tracegrad.proxy.engine.response import (
    engine_queued_s,
    logprobs_of,
    read_error,
    strip_unrequested,
)
from tracegrad.proxy.engine.routed_experts import ROUTED_EXPERTS
from tracegrad.proxy.engine.token_chunk import MOST_PENDING, TokenChunkReader, TokenRun
from tracegrad.proxy.http import sse
from tracegrad.proxy.http.errors import ApiError, EngineDied, UpstreamError

T = TypeVar("T")

_LOST_THOUGHT = (
    "the engine broke off its answer inside a thought, and the one that went on with it said"
    " something else"
)


class EngineStream:
    """`stamp` gives the policy version of tokens that arrive now."""

    def __init__(self, call: Call, stamp: Callable[[], int]) -> None:
        self._call = call
        self._stamp = stamp
        self._events = sse.EventBuffer()
        self._choices: dict[int, _Choice] = {}
        self._head: Json = {}
        self._usage: Json | None = None
        # A client of chat completions gets the engine's own chunks; who gets a whole answer gets
        # none of them.
        if call.stream:
            self._verbatim = call.dialect == "chat" and call.visible.reasoning
        else:
            self._verbatim = call.path == CHAT_PATH and not call.visible.logprobs
        self._token_chunks: TokenChunkReader | None = None
        self._shown_prompt: orjson.Fragment | None = None  # as the engine wrote it
        self._pending_version = 0  # of what is pending in it
        self._carried: int | None = None  # tokens of ours in the prompt that goes on
        self._text_offset = 0  # where the rest of a text begins, as log-probabilities count
        # The rest is that of a thought, and the engine has not said yet that it knows.
        self._in_thought = False
        self.tail: list[Json] = []
        self.done = False  # the engine said [DONE]
        self.error: ApiError | None = None  # that the engine reported, or a chunk that is none
        self.queued_s: float | None = None  # as `engine_queued_s`

    def feed(self, data: bytes) -> list[Json | bytes]:
        """The chunks that the client may see now, or whole events where these are as the engine
        wrote them; nothing more once there is an `error`."""
        out: list[Json | bytes] = []
        if self.done:  # nothing that follows is of the answer
            return out
        if self._token_chunks is not None and not (data := self._pass(data, out)):
            return out
        for event in self._events.feed(data):
            if self.done:
                break
            payload = sse.event_data(event)
            if payload == sse.DONE:
                self.done = True
            elif payload is not None and self.error is None:
                self.error = self._read(payload, out)
        return out

    @property
    def prompt_tokens(self) -> int | None:
        """Of one prompt, where the engine reported its tokens."""
        for choice in self._choices.values():
            if choice.reply.prompt_token_ids:
                return len(choice.reply.prompt_token_ids)
        return None

    def completions(self) -> list[SampledCompletion]:
        """One for each choice, in order; those cut off have no finish reason."""
        self._settle()
        return [self._choices[index].close(self._head, self._usage) for index in self._indexes()]

    def said_so_far(self) -> tuple[array[int], int] | None:
        """The prompt's tokens and those of the words that were passed on, and how many these are;
        what is behind them is forgotten. Empty where nothing came. None: of several choices, of a
        tool call that had begun, and without tokens nobody can go on, nor where the client has
        tokens already whose words are not whole."""
        self._settle()
        if not self._choices:
            return token_id_array(), 0
        if self._indexes() != [0] or self.tail:
            return None
        shown = self._call.visible
        return self._choices[0].cut_to_words(tokens_are_shown=shown.ids or shown.logprobs)

    def go_on(self, stamp: Callable[[], int], carried: int) -> None:
        """What is fed from now on comes from another engine, whose prompt ended with the `carried`
        tokens of `said_so_far`."""
        self._stamp, self._carried = stamp, carried
        if carried:
            self._text_offset = self._choices[0].text_end
            self._in_thought = self._choices[0].thinks
        self.error, self.done = None, False
        self._events, self._token_chunks = sse.EventBuffer(), None

    def assemble(self) -> Json:
        """What the engine would have answered had it not streamed, as the client may see it."""
        self._settle()
        text = self._head.get("object") == "text_completion"
        answer: Json = {
            **self._head,
            "object": "text_completion" if text else "chat.completion",
            "choices": [self._choices[index].whole(self._call) for index in self._indexes()],
        }
        if self._usage is not None:
            answer["usage"] = self._usage
        if self._call.visible.ids and not text:
            first = next(iter(self._choices.values()), None)
            answer["prompt_token_ids"] = first and first.reply.prompt_token_ids.tolist()
        return answer

    def _indexes(self) -> list[int]:
        return sorted(self._choices)

    def _read(self, payload: bytes, out: list[Json | bytes]) -> ApiError | None:
        self._settle()
        try:
            chunk = orjson.loads(payload) if self._head else self._first(payload)
            if (choices := chunk.get("choices")) is not None:
                if self._in_thought and not self._goes_on_thinking(choices):
                    return EngineDied(_LOST_THOUGHT)
                self._chunk(chunk, out)
                if self._verbatim and self._token_chunks is None and not self._in_thought:
                    self._learn(payload)
                return None
            code = (chunk.get("error") or {}).get("code")
        except (ValueError, KeyError, TypeError, AttributeError):
            return UpstreamError("the engine sent a chunk that cannot be read")
        return read_error(code if isinstance(code, int) else 502, payload, {})

    def _goes_on_thinking(self, choices: list[Json]) -> bool:
        """False: the engine's first words are not of the thought that it goes on with. Either that
        ended here, or its parser does not see by the prompt that one is open: nobody knows."""
        for choice in choices:
            delta = choice["delta"]
            if delta.get("reasoning"):
                self._in_thought = False
            elif delta.get("content") or delta.get("tool_calls"):
                return False
        return True

    def _pass(self, data: bytes, out: list[Json | bytes]) -> bytes:
        """Passes on the events that need no more. Returns what is left of `data`."""
        reader = self._token_chunks
        assert reader is not None
        if self._events.rest or self.error is not None:
            return data
        self._stamp_pending(reader)
        read = reader.read(data, out)
        return data[read:] if read < len(data) else b""

    def pass_frames(self, data: bytes) -> bytes | None:
        """`data` as it came from the wire, in HTTP's chunked encoding: what the client may see of
        it, in the same. None, and nothing is read, where it needs a look by `feed`."""
        reader = self._token_chunks
        if reader is None or self._events.rest or self.done or self.error is not None:
            return None
        self._stamp_pending(reader)
        return reader.read_frames(data)

    def _stamp_pending(self, reader: TokenChunkReader) -> None:
        version = self._stamp()
        if version != self._pending_version or reader.pending >= MOST_PENDING:
            self._settle()
            self._pending_version = version

    def _settle(self) -> None:
        """Record what was passed on."""
        reader = self._token_chunks
        if reader is not None and reader.pending:
            self._choices[reader.index].add_run(reader.take(), self._pending_version)

    def _learn(self, payload: bytes) -> None:
        reader = TokenChunkReader.learn(payload, self._call.visible)
        if reader is not None and reader.index in self._choices:
            self._token_chunks = reader

    def _first(self, payload: bytes) -> Any:
        """The chunk that has the prompt's ids, which are most of it."""
        if self._call.path != CHAT_PATH:
            return orjson.loads(payload)
        rest, prompt = extract_prompt(payload)
        chunk = orjson.loads(rest)
        if prompt is None:
            return chunk
        if chunk.get("prompt_token_ids", prompt) is not None:  # another object's was cut out
            return orjson.loads(payload)
        chunk["prompt_token_ids"] = prompt.values
        self._shown_prompt = orjson.Fragment(prompt.text)
        return chunk

    def _chunk(self, chunk: Json, out: list[Json | bytes]) -> None:
        choices = chunk["choices"]
        if self._carried is not None and self._head:
            _take_for_the_rest(chunk, self._carried, self._text_offset)
        ends = not choices
        version = self._stamp()
        for choice in choices:
            self._record(chunk, choice, version)
            ends = ends or choice.get("finish_reason") is not None
        if usage := chunk.get("usage"):
            for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
                _typed(int, usage.get(count))
            self._usage = usage
            self.queued_s = engine_queued_s(chunk)
        if self._shown_prompt is not None:
            chunk["prompt_token_ids"], self._shown_prompt = self._shown_prompt, None
        strip_unrequested(chunk, self._call.visible)
        if ends:
            if choices or self._call.visible.usage:
                self.tail.append(chunk)
        elif not _says_nothing(chunk):
            out.append(chunk)

    def _record(self, chunk: Json, choice: Json, version: int) -> None:
        index = _typed(int, choice["index"])
        if index is None:
            raise TypeError("a choice without an index")
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = _Choice(index)
        if not self._head:
            self._head = {key: chunk.get(key) for key in ("id", "created", "model", "object")}
        state.add(choice, version, self._call)
        ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if ids and (prompt := prompt_token_ids_of(ids)) is not None:
            # In chat completions all choices share the prompt that comes with the first chunk.
            state.reply.prompt_token_ids = prompt


def _take_for_the_rest(chunk: Json, carried: int, text_offset: int) -> None:
    """As a chunk in the middle of the answer: its client and the record have the prompt and the
    role, and the counts are those of one answer."""
    chunk.pop("prompt_token_ids", None)
    for choice in chunk["choices"]:
        choice.pop("prompt_token_ids", None)
        if offsets := (choice.get("logprobs") or {}).get("text_offset"):
            choice["logprobs"]["text_offset"] = [text_offset + offset for offset in offsets]
        delta = choice.get("delta") or {}
        if delta.pop("role", None) and not delta.get("content"):
            delta.pop("content", None)
    if usage := chunk.get("usage"):
        usage["prompt_tokens"] = (usage.get("prompt_tokens") or 0) - carried
        usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + carried
        usage.pop("completion_tokens_details", None)  # of the rest alone


def _says_nothing(chunk: Json) -> bool:
    """A chunk that carried only token ids: without them the engine would not have sent it."""
    if chunk.get("usage"):
        return False
    for choice in chunk["choices"]:  # once a token: a plain loop, at half the price
        if choice.get("delta") or choice.get("text") or choice.get("logprobs"):
            return False
        if "token_ids" in choice:
            return False
    return True


class _Choice:
    """One choice, put together from its deltas."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.reply = SampledCompletion()
        self._role = "assistant"
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tools: dict[int, Json] = {}
        self._logprobs: list[Json] = []  # where the client asked for them
        self._said = 0  # tokens, up to the last one that came with a word
        self.thinks = False  # that word was one of a thought
        self.text_end = 0  # behind the last token of a text, as log-probabilities count

    def cut_to_words(self, *, tokens_are_shown: bool) -> tuple[array[int], int] | None:
        """As `EngineStream.said_so_far`."""
        reply = self.reply
        if self._tools or reply.discard_reason or not reply.prompt_token_ids:
            return None
        if tokens_are_shown and self._said < len(reply.token_ids):
            return None
        reply.truncate(self._said)
        return reply.prompt_token_ids + reply.token_ids, self._said

    def add(self, choice: Json, version: int, call: Call) -> None:
        self.reply.add(choice.get("token_ids"), logprobs_of(choice), version)
        if call.visible.logprobs and choice.get("logprobs"):
            self._logprobs.append(choice["logprobs"])
        if (text := choice.get("text")) is not None:
            self._content.append(_typed(str, text) or "")
            self._note_words(text, None)
            self.text_end = _text_end(choice) or self.text_end
        else:
            delta = choice["delta"]
            if call.visible.one_tool_call and (tools := delta.get("tool_calls")):
                _keep_first_call(delta, tools)
            self._say(delta, call.tool_call_prefix)
            self._note_words(delta.get("content"), delta.get("reasoning"))
        if (finish := _typed(str, choice.get("finish_reason"))) is not None:
            self.reply.finish_reason = finish
            self.reply.stop_reason = choice.get("stop_reason")
            choice.pop(ROUTED_EXPERTS, None)  # no stream of vLLM's has them yet; no client may

    def add_run(self, run: TokenRun, version: int) -> None:
        """As `add`, of a stream that its client gets as one: nobody puts its log-probabilities
        together again."""
        self.reply.add(run.token_ids, run.logprobs, version)
        if run.content:
            self._content.append(run.content)
        if run.reasoning:
            self._reasoning.append(run.reasoning)
        if run.content or run.reasoning:
            self._said = len(self.reply.token_ids) - run.unsaid
            self.thinks = run.thinks

    def _note_words(self, content: object, thought: object) -> None:
        if content or thought:
            self._said = len(self.reply.token_ids)
            self.thinks = not content

    def close(self, head: Json, usage: Json | None) -> SampledCompletion:
        self.reply.response = {
            **head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": self.index,
                    "message": self._message(),
                    "finish_reason": self.reply.finish_reason,
                    "stop_reason": self.reply.stop_reason,
                }
            ],
        }
        if usage is not None:
            self.reply.response["usage"] = usage
        if not self.reply.prompt_token_ids:
            self.reply.discard_tokens("no_tokens")
        return self.reply

    def whole(self, call: Call) -> Json:
        choice: Json = {"index": self.index}
        if call.path.endswith("/chat/completions"):
            choice["message"] = self._message()
            if not call.visible.reasoning:
                choice["message"].pop("reasoning", None)
        else:
            choice["text"] = "".join(self._content)
        choice["logprobs"] = _joined(self._logprobs) if self._logprobs else None
        choice["finish_reason"] = self.reply.finish_reason
        choice["stop_reason"] = self.reply.stop_reason
        if call.visible.ids:
            choice["token_ids"] = self.reply.token_ids.tolist()
        return choice

    def _message(self) -> Json:
        message: Json = {"role": self._role, "content": "".join(self._content) or None}
        if self._reasoning:
            message["reasoning"] = "".join(self._reasoning)
        if self._tools:
            message["tool_calls"] = [self._tools[index] for index in sorted(self._tools)]
        return message

    def _say(self, delta: Json, tool_call_prefix: str) -> None:
        if role := _typed(str, delta.get("role")):
            self._role = role
        if content := _typed(str, delta.get("content")):
            self._content.append(content)
        if thought := _typed(str, delta.get("reasoning")):
            self._reasoning.append(thought)
        for tool in delta.get("tool_calls") or ():
            self._tool(tool, tool_call_prefix)

    def _tool(self, delta: Json, prefix: str) -> None:
        function = delta.get("function") or {}
        known = self._tools.get(delta["index"])
        if known is None:
            known = self._tools[delta["index"]] = {
                "id": None,
                "type": "function",
                "function": {"name": "", "arguments": ""},
            }
        if engine_id := delta.get("id"):
            # In the delta too, which the client gets.
            known["id"] = delta["id"] = tool_call_id(engine_id, prefix)
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""


def _keep_first_call(delta: Json, tools: list[Json]) -> None:
    """Of the tool calls that a chunk tells a part of, in place."""
    tools[:] = [tool for tool in tools if tool["index"] == 0]
    if not tools:
        del delta["tool_calls"]


def _typed(kind: type[T], value: Any) -> T | None:
    """A chunk's field. Raises TypeError while the chunk is read: found when the answer is put
    together, a wrong one would cost the whole turn."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value


def _text_end(choice: Json) -> int | None:
    """Where the next token's text begins, as vLLM counts in its log-probabilities."""
    told = choice.get("logprobs") or {}
    if not told.get("text_offset") or not told.get("tokens"):
        return None
    return int(told["text_offset"][-1]) + len(told["tokens"][-1])


def _joined(parts: list[Json]) -> Json:
    """Log-probabilities of chunks as those of one answer: each list, one after another."""
    joined: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, list):
                joined[key] = joined.get(key, []) + value
    return joined
