"""A recorded turn, as much of it as a continuation needs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tracegrad.events import Json


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
