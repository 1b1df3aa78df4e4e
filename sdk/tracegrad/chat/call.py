"""One LLM call in the canonical form of every dialect, and a recorded turn as far as a
continuation of it needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from tracegrad.events import Json, new_id
from tracegrad.protocol import MAX_MODEL_NAME


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """`prompt_ids` are those that the engine said it used, `completion_ids` those it sampled.

    `reply` is the canonical assistant message as it was recorded, `position` how many messages
    came before it. `finish_reason` and `stop_reason` are vLLM's: the latter is the stop string or
    the id of the stop token that ended the reply, None for the model's own end token.
    """

    turn_id: str
    prompt_ids: array[int]
    completion_ids: array[int]
    reply: Json
    reply_index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def is_open(self) -> bool:
        """Whether more text may follow what was sampled: no token ended the reply, but the limit
        on its length, or a stop string, whose tokens are among the sampled ones."""
        return self.finish_reason == "length" or isinstance(self.stop_reason, str)


CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class VisibleFields:
    """What the client asked to see of what the engine is always asked for."""

    ids: bool = False
    logprobs: bool = False
    reasoning: bool = True
    usage: bool = True  # a chunk of usage at the end of a stream
    # Of several tool calls the first: the engine was not asked for one alone.
    one_tool_call: bool = False


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
    # What the ids of its tool calls begin with, as clients of its dialect expect them.
    tool_call_prefix: str = "call_"
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

    def asked_model(self, served: str) -> str | None:
        """The model's name as the client gave it, less what exceeds MAX_MODEL_NAME. None: as it is
        `served`, or it gave none."""
        asked = self.body.get("model")
        return str(asked)[:MAX_MODEL_NAME] if asked and asked != served else None

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
