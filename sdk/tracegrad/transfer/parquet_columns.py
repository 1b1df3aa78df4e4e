"""What the columns of each Parquet file are called and hold, in words of `layouts.Column`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tracegrad.transfer.layouts import Column

# Free-form objects are JSON texts in a column: their fields differ from row to row.
_SPAN: Mapping[str, Column] = {
    "trace_id": "text",
    "span_id": "text",
    "parent_span_id": "text",
    "name": "text",
    "kind": "text",
    "start_ns": "integer",
    "end_ns": "integer",
    "status": "text",
    "attributes": "json",
}
_REWARD: Mapping[str, Column] = {
    "reward_id": "text",
    "value": "number",
    "name": "text",
    "turn": "integer",
    "source": "text",
    "label": "text",
    "given_at": "number",
    "created_at": "number",
}
_END: Mapping[str, Column] = {"outcome": "text", "error": "text", "finished_at": "number"}
_TURN: Mapping[str, Column] = {
    "turn_id": "text",
    "parent_turn_id": "text",
    "fork_reason": "text",
    "dialect": "text",
    "model": "text",
    "new_token_ids": "ids",
    "completion_token_ids": "ids",
    "completion_logprobs": "logprobs",
    "policy_versions": "pairs",
    "sampling": "json",
    "finish_reason": "text",
    "untrainable": "text",
    "parent_span_id": "text",
    "created_at": "number",
    "trained_step": "integer",
    "skip_reason": "text",
    "fate_at": "number",
    "state_key": "text",
    "observation": "text",
    "routed_experts": "file",
    "request": "json",
    "response": "json",
}

# Of `export --rollouts`. Rows that are no rollout have their fields in `other`.
ROLLOUT: Mapping[str, Column] = {
    "tracegrad": "integer",
    "kind": "text",
    "rollout_id": "text",
    "opened": "flag",
    "opened_at": "number",
    "task_id": "text",
    "agent": "text",
    "tags": "json",
    "task": "json",
    "outcome": "text",
    "error": "text",
    "finished_at": "number",
    "consumed_at": "number",
    "consumed_step": "integer",
    "outcomes": {"*": _END},
    "rewards": {"*": _REWARD},
    "spans": {"*": _SPAN},
    "turns": {"*": _TURN},
    "other": "json",
}
# Of `export --turns`.
TURN: Mapping[str, Column] = {
    "turn_id": "text",
    "parent_turn_id": "text",
    "rollout_id": "text",
    "task_id": "text",
    "agent": "text",
    "outcome": "text",
    "reward": "number",
    "dialect": "text",
    "model": "text",
    "prompt_token_ids": "ids",
    "completion_token_ids": "ids",
    "completion_logprobs": "logprobs",
    "policy_versions": "pairs",
    "finish_reason": "text",
    "created_at": "number",
    "trained_step": "integer",
    "skip_reason": "text",
}

_CALL: Mapping[str, Column] = {
    "id": "text",
    "type": "text",
    "function": {"name": "text", "arguments": "text"},
}
_MESSAGE: Mapping[str, Column] = {
    "role": "text",
    "content": "text",
    "reasoning_content": "text",
    "tool_calls": {"*": _CALL},
    "tool_call_id": "text",
    "name": "text",
}


def has_messages(columns: Mapping[str, Column]) -> bool:
    return "messages" in columns.values()


def message_fields(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column]) -> set[str]:
    """Fields of the chat messages that occur. A field that is in a file is in all its messages, as
    null where it was not, and some chat templates distinguish null from nothing."""
    names = [name for name, column in columns.items() if column == "messages"]
    found = {"role", "content"}
    for row in rows:
        for name in names:
            for message in row[name] or ():
                found |= message.keys()
    return found


def with_messages(columns: Mapping[str, Column], fields: set[str]) -> Mapping[str, Column]:
    """The columns, "messages" spelled out."""
    message = {name: column for name, column in _MESSAGE.items() if name in fields}
    assert fields <= _MESSAGE.keys(), f"messages have unknown fields {fields - _MESSAGE.keys()}"
    return {
        name: {"*": message} if column == "messages" else column for name, column in columns.items()
    }
