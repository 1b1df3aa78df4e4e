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
from tracegrad.store.read.turns import find_turn
from tracegrad_trainer.config.resample import RESAMPLE_OF, RESAMPLED, ResampleSettings

Reason = Literal["no_request", "not_chat", "tools", "media", "held_out"]
# Rollouts that are looked at, the newest: where more came, training is far behind them.
_NEWEST = 1_000
# Of whoever opened a rollout the events come later than its first call, by so much at most.
_OPENED_WITHIN_S = 5.0
# How its answer is sent and looked at, which is ours to say.
_NOT_SAMPLED = ("stream", "stream_options", "n", "logprobs", "top_logprobs", "user", "metadata")


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """`body`: a chat completion request, to be sampled from the model's own distribution.
    `agent_name`: that called, where it said so; by its name turns are selected."""

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
    processes, which the store tells by `RESAMPLE_OF`."""

    store: Store
    settings: ResampleSettings
    held_out: Mapping[str, str] | None = None
    clock: Callable[[], float] = time.time
    unusable: Counter[str] = field(default_factory=Counter)  # reason -> rollouts
    _taken: set[str] = field(default_factory=set)

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
        return [each for each in found if each.rollout_id not in self._taken]

    def _read(self, first: FirstTurn) -> tuple[LivePrompt | None, Reason | None]:
        with self.store.reading() as connection:
            tags = load_tags(connection, [first.rollout_id]).get(first.rollout_id, {})

            def find(turn_id: str) -> Turn | None:
                return find_turn(connection, turn_id, expert_routing=False)

            turn = find(first.turn_id)
            call = None if turn is None else recorded_call(turn, find)
        is_tagged = self.held_out is not None and self.held_out.items() <= tags.items()
        reason = unusable_reason(call, held_out=first.held_out or is_tagged)
        if reason is not None:
            return None, reason
        assert call is not None
        assert turn is not None
        body = {k: v for k, v in force_on_policy(call.body).items() if k not in _NOT_SAMPLED}
        return LivePrompt(first.rollout_id, first.opened_at, tags, body, turn.agent_name), None
