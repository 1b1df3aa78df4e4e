"""Which first prompts of live rollouts can be sampled again, and why the others cannot."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tracegrad.chat.call import CHAT_PATH, Call
from tracegrad.chat.sampling_params import force_on_policy
from tracegrad.events import Json, Turn
from tracegrad.proxy.dialects.history import recorded_call
from tracegrad.store import Store
from tracegrad.store.read.first_turns import FirstTurn, newest_first_turns
from tracegrad.store.read.rollouts import load_tags
from tracegrad.store.read.turn_scopes import load_turn_scopes
from tracegrad.store.read.turns import find_turn
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.batches import BatchSettings
from tracegrad_trainer.batches.pattern_watch import PatternWatch
from tracegrad_trainer.batches.turn_selector import is_selected
from tracegrad_trainer.config.resample import RESAMPLE_OF, RESAMPLED, ResampleSettings

Reason = Literal["no_request", "not_chat", "tools", "media", "held_out", "turn_not_selected"]
# Of the rollouts that are made here, where the live call has none.
AGENT = "resample"
# Rollouts that are looked at, the newest: where more came, training is far behind them.
_NEWEST = 1_000
# Of whoever opened a rollout the events come later than its first call, by so much at most.
_OPENED_WITHIN_S = 5.0
# An agent's span is sent when it has ended. So long after its rollout was opened it is decided
# whose a call was: an agent that runs for longer is not known by its span.
_SPANS_WITHIN_S = 30.0
# How its answer is sent and looked at, which is ours to say.
_NOT_SAMPLED = ("stream", "stream_options", "n", "logprobs", "top_logprobs", "user", "metadata")


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """`body`: a chat completion request, to be sampled from the model's own distribution.
    `agent_name`: that called, as the call, its spans or its rollout say (`TurnScope`)."""

    rollout_id: str
    opened_at: float
    tags: Mapping[str, str]
    body: Json
    agent_name: str | None = None


def unusable_reason(call: Call | None, *, held_out: bool) -> Reason | None:
    """Why a first call is not sampled again; None: it can be."""
    if held_out:
        return "held_out"
    if call is None:
        return "no_request"
    if call.path != CHAT_PATH or not call.messages:
        return "not_chat"
    if call.body.get("tools") or call.body.get("functions"):
        return "tools"
    return "media" if call.untrainable == "media" else None


@dataclass(slots=True)
class LivePrompts:
    """Those of one store, newest first, each once: also of all that were sampled again by earlier
    processes, which the store tells by `RESAMPLE_OF`. `selection` says which of them training would
    select; it has no span paths."""

    store: Store
    settings: ResampleSettings
    held_out: Mapping[str, str] | None = None
    selection: BatchSettings = field(default_factory=BatchSettings)
    clock: Callable[[], float] = time.time
    unusable: Counter[str] = field(default_factory=Counter)  # reason -> rollouts
    patterns: PatternWatch = field(init=False)  # over the prompts that were looked at
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.patterns = PatternWatch(self.selection)

    def take(self) -> LivePrompt | None:
        """The newest that can be sampled again; None: there is none. Raises StoreError."""
        for first in self._newest():
            self._taken.add(first.rollout_id)
            found, reason = self._read(first)
            if found is not None:
                return found
            if reason is not None:
                self.unusable[reason] += 1
        return None

    def usable(self) -> tuple[list[str], Counter[str]]:
        """Rollouts whose first prompt could be sampled again now, and why others' cannot, of the
        newest; nothing is taken. Raises StoreError."""
        read = [self._read(first) for first in self._newest()]
        reasons = Counter[str](reason for _, reason in read if reason is not None)
        return [prompt.rollout_id for prompt, _ in read if prompt is not None], reasons

    def _newest(self) -> list[FirstTurn]:
        now = self.clock()
        with self.store.reading() as connection:
            found = newest_first_turns(
                connection,
                tags=self.settings.tags,
                without=RESAMPLED,
                named_by=RESAMPLE_OF,
                since=now - self.settings.max_age_s,
                unopened_before=now - _OPENED_WITHIN_S,
                limit=_NEWEST,
            )
        # What is not found now never is again: it is too old, or was sampled again.
        self._taken &= {each.rollout_id for each in found}
        return [
            each
            for each in found
            if each.rollout_id not in self._taken and self._has_agent(each, now)
        ]

    def _has_agent(self, first: FirstTurn, now: float) -> bool:
        """Whether nothing that comes later says which agent called, where it matters."""
        if not self.selection.agents or first.agent_name is not None:
            return True
        return first.opened_at < now - min(_SPANS_WITHIN_S, self.settings.max_age_s / 2)

    def _read(self, first: FirstTurn) -> tuple[LivePrompt | None, Reason | None]:
        with self.store.reading() as connection:
            tags = load_tags(connection, [first.rollout_id]).get(first.rollout_id, {})

            def find(turn_id: str) -> Turn | None:
                return find_turn(connection, turn_id, expert_routing=False)

            turn = find(first.turn_id)
            call = None if turn is None else recorded_call(turn, find)
            scopes = load_turn_scopes(connection, [first.rollout_id])
        is_tagged = self.held_out is not None and self.held_out.items() <= tags.items()
        reason = unusable_reason(call, held_out=first.held_out or is_tagged)
        if reason is not None:
            return None, reason
        assert call is not None
        assert turn is not None
        agent = scopes[turn.turn_id].agent
        again = {turn.turn_id: TurnScope(agent or AGENT)}
        self.patterns.look([turn], again)
        if not is_selected(turn, self.selection, again):
            return None, "turn_not_selected"
        body = {k: v for k, v in force_on_policy(call.body).items() if k not in _NOT_SAMPLED}
        return LivePrompt(first.rollout_id, first.opened_at, tags, body, agent), None
