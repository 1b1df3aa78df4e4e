"""One recorded turn and what continues it: a splice, or a fork with its reason."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from support.chat.conversations import user
from support.chat.generated_templates import Parts, model_of
from support.chat.real_templates import fresh_ids
from tracegrad.chat.messages import Frame
from tracegrad.chat.model import ModelText
from tracegrad.chat.recorded_turn import RecordedTurn
from tracegrad.proxy.prompt_reuse.fork_reasons import Fork, Reason
from tracegrad.proxy.prompt_reuse.splice import Spliced, splice

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
    frame: Frame | None = None,
    clock: datetime = NOW,
    **ended: Any,
) -> tuple[Spliced | Fork, ModelText, RecordedTurn]:
    """A root turn that the engine rendered, and what continues it."""
    text, before, frame = model_of(parts.source), before or [ASK], frame or Frame()
    prompt = fresh_ids(text, before, frame, NOW)
    ids = text.tokenizer.encode(sampled)
    turn = RecordedTurn("t", prompt, ids, reply, len(before), **{"finish_reason": "stop"} | ended)
    return splice(text, [turn], [*before, reply, *new], frame, clock), text, turn


def new_text(outcome: tuple[Spliced | Fork, ModelText, RecordedTurn]) -> str:
    """What was added, as text; the recorded tokens are checked to be there."""
    spliced, text, turn = outcome
    assert isinstance(spliced, Spliced), spliced
    context = turn.prompt_ids + turn.completion_ids
    assert spliced.ids[: len(context)] == context
    return text.tokenizer.decode(spliced.ids[len(context) :])


def reason(outcome: tuple[Spliced | Fork, ModelText, RecordedTurn]) -> Reason:
    fork = outcome[0]
    assert isinstance(fork, Fork), fork
    return fork.reason
