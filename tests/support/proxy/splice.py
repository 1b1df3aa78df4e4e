"""One recorded turn and what continues it: a splice, or a fork with its reason."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from support.chat.conversations import user
from support.chat.generated_templates import Parts, model_of
from support.chat.real_templates import fresh_ids
from tracegrad.chat.call import RecordedTurn
from tracegrad.chat.messages import RenderOptions
from tracegrad.chat.model import ChatFormat
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork
from tracegrad.proxy.prompt_reuse.splice import SplicedPrompt, splice_prompt

Json = dict[str, Any]

NOW = datetime(2026, 11, 20, tzinfo=UTC)
ASK, MORE = user("How many lamps?"), user("And in Rome?")


def continued(
    parts: Parts,
    reply: Json,
    new: list[Json],
    sampled: str,
    *,
    before: list[Json] | None = None,
    frame: RenderOptions | None = None,
    clock: datetime = NOW,
    echoed: Json | None = None,
    **ended: Any,
) -> tuple[SplicedPrompt | PromptFork, ChatFormat, RecordedTurn]:
    """A root turn that the engine rendered, and what continues it; `echoed` is the reply as it
    came back, where that is another."""
    text, before, frame = model_of(parts.source), before or [ASK], frame or RenderOptions()
    prompt = fresh_ids(text, before, frame, NOW)
    ids = text.tokenizer.encode(sampled)
    turn = RecordedTurn("t", prompt, ids, reply, len(before), **{"finish_reason": "stop"} | ended)
    return splice_prompt(text, [turn], [*before, echoed or reply, *new], frame, clock), text, turn


def new_text(outcome: tuple[SplicedPrompt | PromptFork, ChatFormat, RecordedTurn]) -> str:
    """What was added, as text; the recorded tokens are checked to be there."""
    spliced, text, turn = outcome
    assert isinstance(spliced, SplicedPrompt), spliced
    context = turn.prompt_ids + turn.completion_ids
    assert spliced.ids[: len(context)] == context
    return text.tokenizer.decode(spliced.ids[len(context) :])


def reason(outcome: tuple[SplicedPrompt | PromptFork, ChatFormat, RecordedTurn]) -> ForkReason:
    fork = outcome[0]
    assert isinstance(fork, PromptFork), fork
    return fork.reason
