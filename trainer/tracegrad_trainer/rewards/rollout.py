"""A finished rollout as scorers get it: what was asked, said and called, without token ids.

The process of a user's function imports it, and little else: it is to start fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracegrad.events import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTurn:
    """An LLM call. `messages` are all that it was made with, in the form of Chat Completions,
    whatever dialect the client speaks; `reply` is the answer's, None where none was recorded.
    `tools` are the names of those that the model was offered. Texts that were not kept are not
    here."""

    turn_id: str
    messages: Sequence[Json]
    reply: Json | None
    tools: Sequence[str]
    model: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    created_at: float  # seconds since the epoch

    @property
    def text(self) -> str:
        """Of the reply; "" where it has none."""
        return text_of((self.reply or {}).get("content"))

    @property
    def tool_calls(self) -> Sequence[Json]:
        """Of the reply: `{"id": ..., "function": {"name": ..., "arguments": ...}}`."""
        calls = (self.reply or {}).get("tool_calls")
        return calls if isinstance(calls, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """`rewards`: what is known of its parts, by name; `task`: what was asked, as the agent gave
    it. Turns are in order of capture."""

    rollout_id: str
    task_id: str | None
    task: Any
    agent: str | None
    tags: Mapping[str, str]
    outcome: str
    error: str | None
    opened_at: float
    finished_at: float | None
    rewards: Mapping[str, float]
    turns: Sequence[ScoredTurn]

    @property
    def replies(self) -> list[str]:
        """The texts of its replies."""
        return [turn.text for turn in self.turns]

    @property
    def last_reply(self) -> str:
        """Of the last turn that has one; "" where none has."""
        return next((turn.text for turn in reversed(self.turns) if turn.reply is not None), "")

    def as_json(self) -> Json:
        return asdict(self)


def text_of(content: Any) -> str:
    """Of a message's content: a text, or parts of which some are texts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))
