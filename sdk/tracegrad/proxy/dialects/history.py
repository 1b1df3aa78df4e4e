"""Conversations, read back from recorded turns in canonical form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracegrad.chat.call import Call
from tracegrad.events import Json, Turn
from tracegrad.proxy.dialects.registry import call_of

FindsTurn = Callable[[str], Turn | None]


class TurnNotRecorded(LookupError):
    """The turn that a call names is not in the store, or its texts are not (`textless`)."""

    def __init__(self, turn_id: str, *, textless: bool = False) -> None:
        super().__init__(turn_id)
        self.textless = textless


def recorded_reply(turn: Turn) -> Json | None:
    """The message that the model answered with."""
    choices: Sequence[Json] = (turn.response or {}).get("choices") or ()
    return choices[0].get("message") if choices else None


def recorded_call(turn: Turn, find: FindsTurn) -> Call | None:
    """The turn's call with the whole conversation, also where the client had left it out."""
    call = call_of(turn)
    if call is None:
        return None
    if call.previous is not None:
        try:
            call = call.continuing(conversation_of(call.previous, find))
        except TurnNotRecorded:
            return None
    return call.with_one_system()


def conversation_of(turn_id: str, find: FindsTurn) -> list[Json]:
    """A turn's messages and its reply, without its instructions. Raises TurnNotRecorded."""
    calls: list[tuple[Call, Json]] = []
    wanted: str | None = turn_id
    while wanted is not None:
        turn = find(wanted)
        call = call_of(turn) if turn is not None else None
        reply = recorded_reply(turn) if turn is not None else None
        if call is None or reply is None:
            raise TurnNotRecorded(wanted, textless=turn is not None)
        calls.append((call, reply))
        wanted = call.previous
    messages: list[Json] = []
    for call, reply in reversed(calls):
        messages += [*call.own_messages, reply]
    return messages
