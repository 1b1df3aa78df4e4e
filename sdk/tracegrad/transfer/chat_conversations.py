"""Conversations from elsewhere, as text: each a finished rollout with one turn without tokens.

    {"messages": [...], "tools": [...], "task_id": "...", "reward": 1.0}

The last message is the model's reply, all before it its prompt. Without a `rollout_id` the id is a
digest of the messages, so that importing it again changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tracegrad.events import (
    Json,
    Outcome,
    Reward,
    RolloutFinished,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.jsonutil import encode_json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.schema import ConversationObject
from tracegrad.transfer.validation import InvalidObject, validate, without_nulls

# `Turn.untrainable` of a turn that is text only.
NO_TOKENS = "no_tokens"
# In `Turn.sampling`: nobody sampled this here; every reply of the conversation is the teacher's.
SOURCE = "source"
IMPORTED = "imported_messages"


def is_conversation(value: Json) -> bool:
    return value.get("messages") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedConversation:
    """`messages` have all their fields; `rest` is what else was written beside the known fields."""

    rollout_id: str
    messages: list[Json]
    tools: list[Any] | None
    rest: Json
    fields: ConversationObject

    def as_record(self, at: float) -> RolloutRecord:
        """As a rollout of the time `at`, if it does not say one."""
        given, rollout_id = self.fields, self.rollout_id
        at = at if given.created_at is None else given.created_at
        task = {} if given.task is None else {"task": given.task}
        return RolloutRecord(
            rollout_id=rollout_id,
            opened_at=at,
            task_id=given.task_id,
            agent=given.agent,
            tags=given.tags or {},
            task=self.rest | task if self.rest else given.task,
            outcome=Outcome.COMPLETED.value,
            finished_at=at,
            outcomes=[RolloutFinished(rollout_id=rollout_id, finished_at=at)],
            rewards=[] if given.reward is None else [_reward(rollout_id, given.reward, at)],
            turns=[_turn(self, at)],
        )


def read_conversation(value: Json) -> ImportedConversation:
    """Fields that the schema does not have become the rollout's `task`. Raises InvalidObject."""
    fields = validate(value, ConversationObject)
    messages, tools = value["messages"], _tools(fields.tools)
    _check_messages(messages)
    digest = _digest([without_nulls(messages), tools, fields.task_id])
    return ImportedConversation(
        rollout_id=fields.rollout_id or digest,
        messages=messages,
        tools=tools,
        rest={key: item for key, item in value.items() if key not in fields.__struct_fields__},
        fields=fields,
    )


def imported_messages(turn: Turn) -> bool:
    """Whether the turn is a whole conversation of a teacher's."""
    return turn.sampling.get(SOURCE) == IMPORTED


def _check_messages(messages: list[Json]) -> None:
    if len(messages) < 2:
        raise InvalidObject("messages", f"{len(messages)}; write what was asked and the reply")
    if messages[-1]["role"] != "assistant":
        raise InvalidObject(
            f"messages[{len(messages) - 1}].role",
            f"{messages[-1]['role']!r}; the last message is the assistant's reply",
        )


def _tools(tools: Any) -> list[Any] | None:
    """A list, or a text with one: columns cannot hold what differs from tool to tool."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise InvalidObject("tools", "it is a text and no JSON; write a list") from None
    if tools is not None and not isinstance(tools, list):
        raise InvalidObject("tools", "write a list, or a JSON text with one")
    return tools or None


def _turn(teacher: ImportedConversation, at: float) -> Turn:
    reply = teacher.messages[-1]
    finish = "tool_calls" if reply.get("tool_calls") else "stop"
    model = teacher.fields.model or ""
    request: Json = {"model": model, "messages": teacher.messages[:-1]}
    if teacher.tools is not None:
        request["tools"] = teacher.tools
    return Turn(
        turn_id=_digest([teacher.rollout_id, "turn"]),
        rollout_id=teacher.rollout_id,
        dialect="chat",
        model=model,
        prompt_token_ids=token_id_array(),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        sampling={SOURCE: IMPORTED},
        finish_reason=finish,
        untrainable=NO_TOKENS,
        request=request,
        response={
            "object": "chat.completion",
            "model": model,
            "choices": [{"index": 0, "message": reply, "finish_reason": finish}],
        },
        created_at=at,
    )


def _reward(rollout_id: str, value: float, at: float) -> Reward:
    return Reward(
        reward_id=_digest([rollout_id, "reward", value]),
        rollout_id=rollout_id,
        value=value,
        source="import",
        created_at=at,
    )


def _digest(value: Any) -> str:
    return hashlib.blake2b(encode_json(value), digest_size=16).hexdigest()
