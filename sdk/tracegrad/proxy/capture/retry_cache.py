"""Answers already given, for a client library that asks the same again.

A library whose connection broke sends its call once more and says so. When the first one was
answered and recorded, sampling another answer would make a second turn that the agent never
knew of; it gets the recorded one instead.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from tracegrad.chat.call import CHAT_PATH, Call
from tracegrad.events import Json, Turn
from tracegrad.proxy.shared_log import SharedLog

# Clients wait at most some minutes between two tries.
KEPT_S = 600.0
# Bytes of memory for all of it, and what a fingerprint and the id of a turn take of them.
MOST_BYTES = 16 << 20
_CALL_BYTES = 500
_ID_BYTES = 100
ANSWERED_BYTES = _CALL_BYTES + _ID_BYTES  # of a call with one answer
# With two answers nobody can tell which is asked for again: more are not worth keeping.
_MOST_ANSWERS = 2

Fingerprint = tuple[int, int, int]
FailureId = bytes  # random: forks share their state of `random`


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether a library (openai, anthropic) says that it sends this call again."""
    count = headers.get("x-stainless-retry-count", "")
    return re.fullmatch("[0-9]{1,4}", count) is not None and int(count) > 0


def fingerprint(rollout_id: str | None, path: str, raw: bytes) -> Fingerprint:
    """Equal for equal calls of one rollout, in this process and its forks."""
    return hash(raw), len(raw), hash((rollout_id, path))


@dataclass(slots=True)
class _Outcomes:
    """What equal calls came to: answers, as the ids of their turns, and failures.

    Workers may read of a failure after they read that somebody asked again about it, and two of
    them may be asked about one: failures have ids, and both sets only grow.
    """

    # Most calls have one answer and no failure: empty tuples and frozen sets take no memory.
    answers: tuple[tuple[str, ...], ...] = ()
    failed: frozenset[FailureId] = frozenset()
    asked_again: frozenset[FailureId] = frozenset()
    at: float = 0.0

    @property
    def open_failures(self) -> frozenset[FailureId]:
        """Failures that nobody has asked again about."""
        return self.failed - self.asked_again

    @property
    def size(self) -> int:
        """In bytes."""
        ids = sum(map(len, (*self.answers, self.failed, self.asked_again)))
        return _CALL_BYTES + _ID_BYTES * ids


class RetryCache:
    """What became of the calls seen last.

    Equal calls are not always repeats: agents sample one prompt several times side by side, and
    a call may be repeated because it failed. Only where there is one answer, and no failure, can
    a repeat be about nothing else.
    """

    def __init__(self, others: SharedLog | None = None, *, most_bytes: int = MOST_BYTES) -> None:
        """`others`: the other workers of the proxy; a repeat may come to any of them."""
        self._others = others
        if others is not None:
            others.subscribe("answered", self._add_answer)
            others.subscribe("failed", self._add_failure)
            others.subscribe("asked again", self._add_repeat)
            # Sampled again: a failure that is not known of would give its retry another's turn.
            others.when_lost(self._forget_all)
        # One alone may be larger than all are to be together.
        self._given: LRUCache[Fingerprint, _Outcomes] = LRUCache(
            most_bytes, getsizeof=lambda given: min(given.size, most_bytes)
        )

    @property
    def size(self) -> float:
        """In bytes."""
        return self._given.currsize

    def _forget_all(self) -> None:
        self._given.clear()

    def record_answer(self, call: Fingerprint, turn_ids: Sequence[str]) -> None:
        self._add_answer(call, turn_ids)
        if self._others is not None:
            self._others.publish("answered", call, tuple(turn_ids))

    def _add_answer(self, call: Fingerprint, turn_ids: Sequence[str]) -> None:
        given = self._recent(call)
        if len(given.answers) < _MOST_ANSWERS:
            # The second one's ids are never asked for.
            given.answers += (tuple(turn_ids) if not given.answers else (),)
        self._given[call] = given  # with its size of now

    def record_failure(self, call: Fingerprint) -> None:
        """It was refused, or broke off, or its client left."""
        failure = os.urandom(16)
        self._add_failure(call, failure)
        if self._others is not None:
            self._others.publish("failed", call, failure)

    def _add_failure(self, call: Fingerprint, failure: FailureId) -> None:
        given = self._recent(call)
        given.failed |= {failure}
        self._given[call] = given

    def lookup(self, call: Fingerprint) -> tuple[str, ...]:
        """The turns that answered the call which is now repeated; empty to sample again."""
        if self._others is not None:
            self._others.catch_up()
        given = self._given.get(call)
        if given is None or time.monotonic() - given.at > KEPT_S:
            return ()
        if given.open_failures:
            failure = min(given.open_failures)
            self._add_repeat(call, failure)
            if self._others is not None:
                self._others.publish("asked again", call, failure)
            return ()
        return given.answers[0] if len(given.answers) == 1 else ()

    def _add_repeat(self, call: Fingerprint, failure: FailureId) -> None:
        given = self._recent(call)
        given.asked_again |= {failure}
        self._given[call] = given

    def _recent(self, call: Fingerprint) -> _Outcomes:
        """What is known of it, as of now; nothing of what is too old to be asked about."""
        now = time.monotonic()
        given = self._given.get(call)
        if given is None or now - given.at > KEPT_S:
            given = _Outcomes()
        given.at = now
        return given


def recorded_answer(turns: Sequence[Turn], call: Call) -> Json:
    """The engine's whole answer, put together from what was recorded of its choices."""
    answer = dict(turns[0].response or {})
    answer["choices"] = [choice for turn in turns for choice in (turn.response or {})["choices"]]
    if call.path != CHAT_PATH:
        answer["object"] = "text_completion"
        answer["choices"] = [
            {**choice, "text": choice["message"]["content"]} for choice in answer["choices"]
        ]
    return answer


def recorded_chunks(answer: Json, call: Call) -> tuple[list[Json], list[Json]]:
    """The same as a stream: chunks that say something, and those that end it."""
    head = {key: answer.get(key) for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if call.path == CHAT_PATH else "text_completion"
    said, ends = [], []
    for choice in answer["choices"]:
        whole = {"index": choice["index"], "finish_reason": None}
        end = {key: choice.get(key) for key in ("index", "finish_reason", "stop_reason")}
        if call.path == CHAT_PATH:
            message = dict(choice["message"])
            if message.get("tool_calls"):
                message["tool_calls"] = [
                    {"index": number, **tool} for number, tool in enumerate(message["tool_calls"])
                ]
            whole["delta"], end["delta"] = message, {}
        else:
            whole["text"], end["text"] = choice["text"], ""
        said.append({**head, "choices": [whole]})
        ends.append({**head, "choices": [end]})
    if call.visible.usage:
        ends.append({**head, "choices": [], "usage": answer.get("usage")})
    return said, ends
