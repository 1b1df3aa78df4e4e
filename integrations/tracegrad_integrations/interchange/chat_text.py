"""Requests and replies in the words of chat completions: what formats without dialects have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tracegrad.events import Json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.layouts import ReasonCounter
from tracegrad_integrations.exports.conversations import ChatTurn, chat_turns


def texts_of(copy: RolloutRecord, left_out: ReasonCounter) -> Mapping[str, ChatTurn]:
    """By turn id. Turns whose texts cannot be written are counted: their tokens are written."""
    reasons: Counter[str] = Counter()
    found = {each.turn.turn_id: each for each in chat_turns(copy, reasons)}
    for reason, count in reasons.items():
        left_out["texts: " + reason.removeprefix("turns: ")] += count
    return found


def request_of(model: str, messages: list[Json], tools: list[Json] | None) -> Json:
    request: Json = {"model": model, "messages": messages}
    return request | {"tools": tools} if tools else request


def response_of(model: str, reply: Json, finish_reason: str | None) -> Json:
    return {
        "object": "chat.completion",
        "model": model,
        "choices": [{"index": 0, "message": reply, "finish_reason": finish_reason}],
    }
