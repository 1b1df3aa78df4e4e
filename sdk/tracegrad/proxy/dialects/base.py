"""What a dialect is: a client's request into a canonical call, the engine's answer back.

The canonical form is that of OpenAI's chat completions as vLLM serves them: it is what the
engine is asked, what turns are compared by, and what the store keeps of an answer. A dialect
is a set of pure functions around it; nothing in one waits, reads the store or talks to an
engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol

from tracegrad.events import Json, new_id
from tracegrad.proxy.http.errors import ApiError

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class VisibleFields:
    """What the client asked to see of what the engine is always asked for."""

    ids: bool = False
    logprobs: bool = False
    reasoning: bool = True
    usage: bool = True  # a chunk of usage at the end of a stream


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call, checked. `body` is canonical: a chat completion request whose fields the
    engine knows; `request` is what the client sent, for the record."""

    dialect: str
    request: Json
    body: Json
    stream: bool
    visible: VisibleFields = field(default_factory=VisibleFields)
    path: str = CHAT_PATH
    # The turn that this call makes (its first, where n > 1); ids that clients see are made of it.
    turn_id: str = field(default_factory=new_id)
    # The turn whose conversation comes before `messages` (Responses: previous_response_id).
    previous: str | None = None
    # How many of `messages`, the first ones, are this call's alone and no part of what follows it.
    instructions: int = 0
    # Bytes of the request's body, and of the conversation that it only names: what is made of a
    # large one is made in a thread.
    size: int = 0
    # Why the turn must not be trained whatever the sampling was ("media"), or None.
    untrainable: str | None = None

    @property
    def messages(self) -> list[Json]:
        """Canonical messages; empty for a call that has none (text completions)."""
        messages: list[Json] = self.body.get("messages") or []
        return messages

    @property
    def n(self) -> int:
        return int(self.body.get("n") or 1)

    @property
    def own_messages(self) -> list[Json]:
        return self.messages[self.instructions :]

    def continuing(self, earlier: Sequence[Json]) -> Call:
        """The same call behind a conversation that the client left out."""
        lead = self.messages[: self.instructions]
        body = {**self.body, "messages": [*lead, *earlier, *self.own_messages]}
        return replace(self, body=body, previous=None)

    def with_one_system(self) -> Call:
        """Instructions and the system text after them as one message: many templates refuse two."""
        messages = self.messages
        leading = list(takewhile(lambda m: m.get("role") == "system", messages))
        texts = [message.get("content") for message in leading]
        if not self.instructions or len(leading) < 2 or not all(isinstance(t, str) for t in texts):
            return self
        system = {"role": "system", "content": "\n\n".join(map(str, texts))}
        body = {**self.body, "messages": [system, *messages[len(leading) :]]}
        return replace(self, body=body, instructions=1)


class StreamWriter(Protocol):
    """One streamed answer in a dialect's own events. Methods return bytes to send now.

    Order: `begin`, then `chunk` any number of times, then `end` or `error`, once.
    """

    @property
    def content_type(self) -> str: ...

    def begin(self, prompt_tokens: int | None) -> bytes:
        """Before the first chunk; `prompt_tokens` where the engine told."""
        ...

    def chunk(self, chunk: Json) -> bytes:
        """A `chat.completion.chunk` of the engine's, without token ids and log-probabilities
        unless `shown` asks for them."""
        ...

    def end(self, chunks: Sequence[Json]) -> bytes:
        """The chunks that end the stream (finish reasons, usage), after the turn's commit."""
        ...

    def error(self, error: ApiError) -> bytes:
        """In place of the end, once the stream has begun."""
        ...

    def keepalive(self) -> bytes:
        """What changes nothing for the client and keeps its line open; also before `begin`."""
        ...


class Dialect(Protocol):
    """`name` is stored with every turn."""

    name: str

    def parse(self, raw: bytes, path: Mapping[str, Any], query: Mapping[str, str]) -> Call:
        """Raises BadRequest that names the field, as the client spelled it."""
        ...

    def answer(self, call: Call, answer: Json) -> bytes:
        """The body for a client that does not stream, from a whole `chat.completion`."""
        ...

    def writer(self, call: Call) -> StreamWriter: ...

    def error(self, error: ApiError) -> bytes:
        """The JSON body of an error response."""
        ...
