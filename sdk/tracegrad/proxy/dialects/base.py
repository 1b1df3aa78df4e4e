"""What a dialect is: a client's request into a canonical call, the engine's answer back.

The canonical form is that of OpenAI's chat completions as vLLM serves them: it is what the
engine is asked, what turns are compared by, and what the store keeps of an answer. A dialect
is a set of pure functions around it; nothing in one waits, reads the store or talks to an
engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.http.errors import ApiError


class StreamWriter(Protocol):
    """One streamed answer in a dialect's own events. Methods return bytes to send now.

    Order: `begin`, then `chunk` any number of times, then `end` or `error`, once.
    """

    @property
    def content_type(self) -> str: ...

    def begin(self, prompt_tokens: int | None) -> bytes:
        """Before the first chunk; `prompt_tokens` where the engine reported them."""
        ...

    def chunk(self, chunk: Json) -> bytes:
        """A `chat.completion.chunk` of the engine's, without token ids and log-probabilities
        unless `call.visible` asks for them."""
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
