"""ATIF out and in again: tokens, log-probabilities, versions, rewards and the tree of turns."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings

from support.transfer.rollout_records import rollout_records
from tracegrad.events import Turn
from tracegrad.jsonutil import dump_json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad_integrations.exports.conversations import chat_turns
from tracegrad_integrations.interchange.atif_export import trajectory_of
from tracegrad_integrations.interchange.atif_import import read_trajectory


def there_and_back(record: RolloutRecord) -> RolloutRecord:
    written = json.loads(dump_json(trajectory_of(record, Counter())))
    return read_trajectory(written).as_record(99.0)


def without_texts(turn: Turn) -> str:
    return repr(replace(turn, request=None, response=None))  # NaN is not equal to itself


@settings(max_examples=150, deadline=None)
@given(rollout_records())
def test_all_but_the_spelling_of_texts_comes_back(record: RolloutRecord) -> None:
    back = there_and_back(record)
    assert [without_texts(turn) for turn in back.turns] == [
        without_texts(turn) for turn in record.turns
    ]
    assert replace(back, turns=(), spans=()) == replace(record, turns=())
    assert said(back) == said(record)


def said(record: RolloutRecord) -> dict[str, Any]:
    """What each turn was asked and answered, as chat templates take it."""
    return {
        each.turn.turn_id: plain([*each.prompt, each.reply])
        for each in chat_turns(record, Counter())
    }


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments that are the same object are the same; no text is an empty one."""
    found = []
    for message in messages:
        calls = [
            (call["function"]["name"], parsed(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        found.append({**message, "content": message["content"] or "", "tool_calls": calls})
    return found


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
