"""Conversations from elsewhere, as text: each a finished rollout with one turn without tokens.

    {"messages": [...], "tools": [...], "task_id": "...", "reward": 1.0}

The last message is what the model said, all before it what it was asked. Without a `rollout_id`
the id is made of what is said, so that importing it again changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
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
from tracegrad.transfer.validation import FieldReader, without_nulls

# `Turn.untrainable` of a turn that is text only.
NO_TOKENS = "no_tokens"
# In `Turn.sampling`: nobody sampled this here; every reply of the conversation is the teacher's.
SOURCE = "source"
IMPORTED = "imported_messages"


def is_conversation(fields: FieldReader) -> bool:
    return fields.any("messages") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedConversation:
    """A conversation; `created_at` is None where it does not say when it was had."""

    rollout_id: str
    task_id: str | None
    agent: str | None
    tags: dict[str, str]
    task: Any
    messages: list[Json]
    tools: list[Any] | None
    model: str
    reward: float | None
    created_at: float | None

    def as_record(self, at: float) -> RolloutRecord:
        """As a rollout of the time `at`, if it does not say one."""
        at = at if self.created_at is None else self.created_at
        return RolloutRecord(
            rollout_id=self.rollout_id,
            opened_at=at,
            task_id=self.task_id,
            agent=self.agent,
            tags=self.tags,
            task=self.task,
            outcome=Outcome.COMPLETED.value,
            finished_at=at,
            outcomes=[RolloutFinished(rollout_id=self.rollout_id, finished_at=at)],
            rewards=[] if self.reward is None else [_reward(self.rollout_id, self.reward, at)],
            turns=[_turn(self, at)],
        )


def read_conversation(fields: FieldReader) -> ImportedConversation:
    """Fields that it does not know become the rollout's `task`. Raises BadObject."""
    messages = _messages(fields)
    tools = _tools(fields)
    task_id = fields.text_or_none("task_id")
    task = fields.any("task")
    known = ImportedConversation(
        rollout_id=fields.text_or_none("rollout_id")
        or _digest([without_nulls(messages), tools, task_id]),
        task_id=task_id,
        agent=fields.text_or_none("agent"),
        tags=fields.texts("tags"),
        task=task,
        messages=messages,
        tools=tools,
        model=fields.text_or_none("model") or "",
        reward=None if fields.any("reward") is None else fields.reward("reward"),
        created_at=fields.number_or_none("created_at"),
    )
    if rest := fields.rest():
        return replace(known, task=rest if task is None else rest | {"task": task})
    return known


def imported_messages(turn: Turn) -> bool:
    """Whether the turn is a whole conversation of a teacher's."""
    return turn.sampling.get(SOURCE) == IMPORTED


def _messages(fields: FieldReader) -> list[Json]:
    messages = fields.items("messages")
    for message in fields.objects("messages"):
        message.text("role")
        content = message.any("content")
        if content is not None and not isinstance(content, str | list):
            raise message.invalid("content", "write a text, a list of parts or null")
        for call in message.objects("tool_calls"):
            FieldReader(call.any("function"), call.name("function")).text("name")
    if len(messages) < 2:
        raise fields.invalid("messages", f"{len(messages)}; write what was asked and the reply")
    if messages[-1]["role"] != "assistant":
        raise fields.invalid(
            f"messages[{len(messages) - 1}].role",
            f"{messages[-1]['role']!r}; the last message is the assistant's reply",
        )
    return messages


def _tools(fields: FieldReader) -> list[Any] | None:
    """A list, or a text with one: columns cannot hold what differs from tool to tool."""
    tools = fields.any("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise fields.invalid("tools", "it is a text and no JSON; write a list") from None
    if tools is not None and not isinstance(tools, list):
        raise fields.invalid("tools", "write a list, or a JSON text with one")
    return tools or None


def _turn(teacher: ImportedConversation, at: float) -> Turn:
    reply = teacher.messages[-1]
    finish = "tool_calls" if reply.get("tool_calls") else "stop"
    request: Json = {"model": teacher.model, "messages": teacher.messages[:-1]}
    if teacher.tools is not None:
        request["tools"] = teacher.tools
    return Turn(
        turn_id=_digest([teacher.rollout_id, "turn"]),
        rollout_id=teacher.rollout_id,
        dialect="chat",
        model=teacher.model,
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
            "model": teacher.model,
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
