"""Which calls came through this proxy, by what a span reports of them.

An agent whose libraries send spans may call models through the proxy too. Its span of such a call
reports a turn that is recorded already. It is known by the server's id of the answer, which the
client read from us, or by where in its trace it lies: the call came with the id of the span that it
was made in, which is the LLM span or one inside it.

Nothing here is sure to be remembered: whoever asks looks into the store too.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachetools import FIFOCache

from tracegrad.events import Span, Turn
from tracegrad.proxy.shared_log import SharedLog

# How dialects, and vLLM by the id of a request, make the ids that clients see of a turn's.
_ID_PREFIXES = ("msg_", "resp_", "chatcmpl-", "cmpl-")
# Spans within spans; more are not looked through.
_DEEPEST = 1000
_SEVERAL = "*"  # no rollout's id
# Some 2 KiB each in all that is kept of it, of its spans and of its rollout.
MOST_REMEMBERED = 50_000


class CallIndex:
    """Of the last `limit` calls and spans: reading one does not keep it longer. To be used from one
    event loop. `others`: the other workers of the proxy; a call and its span may come to two.
    `rollouts`: of so many, what their calls came to; as many as calls, where it is not given."""

    def __init__(
        self,
        limit: int = MOST_REMEMBERED,
        others: SharedLog | None = None,
        *,
        rollouts: int | None = None,
    ) -> None:
        rollouts = limit if rollouts is None else rollouts
        self._others = others
        if others is not None:
            others.subscribe("call inside", self._add_call)
            others.subscribe("span", self._add_span)
            others.subscribe("span's turn", self._add_turn)
            others.subscribe("answer", self._add_answer)
            others.subscribe("answer moved", self._move_answer)
            others.subscribe("rollout called", self._add_called)
            others.subscribe("call ended", self._add_ended)
        # By trace and span: the span around it, and whether a call was made inside it.
        self._outer: FIFOCache[tuple[str, str], str] = FIFOCache(limit)
        self._around: FIFOCache[tuple[str, str], bool] = FIFOCache(limit)
        self._turns: FIFOCache[tuple[str, str], bool] = FIFOCache(limit)
        self._turn_answers: FIFOCache[tuple[str, str], str] = FIFOCache(limit)
        self._answers: FIFOCache[str, str] = FIFOCache(limit)
        self._inferred: FIFOCache[str, bool] = FIFOCache(rollouts)
        self._called: FIFOCache[str, bool] = FIFOCache(rollouts)
        self._failed: FIFOCache[str, bool] = FIFOCache(rollouts)

    def rollout_called(self, rollout_id: str | None) -> None:
        """A call of the rollout came in: it may be long until it is recorded."""
        if rollout_id is not None and not self.was_called(rollout_id):
            self._add_called(rollout_id)
            self._tell("rollout called", rollout_id)

    def _add_called(self, rollout_id: str) -> None:
        self._called[rollout_id] = True

    def was_called(self, rollout_id: str) -> bool:
        """Whether a call came in that named the rollout, whatever became of it."""
        return self._called.get(rollout_id) is not None

    def call_ended(self, rollout_id: str | None, *, failed: bool) -> None:
        """`failed`: by the engine or by us, and by nothing that its client sent."""
        if rollout_id is not None and self.last_failed(rollout_id) != failed:
            self._add_ended(rollout_id, failed)
            self._tell("call ended", rollout_id, failed)

    def _add_ended(self, rollout_id: str, failed: bool) -> None:
        self._failed[rollout_id] = failed

    def last_failed(self, rollout_id: str) -> bool:
        """Whether the rollout's last call did: what its agent does then is not the policy's."""
        return bool(self._failed.get(rollout_id))

    def call_started(self, trace_id: str | None, span_id: str | None) -> None:
        """A call was made from inside a span.

        To be called when the call comes in: its client has no answer yet, so that its span is sent
        later than this, whatever becomes of the call.
        """
        if trace_id is None or span_id is None:
            return
        self._add_call(trace_id, span_id)
        self._tell("call inside", trace_id, span_id)

    def _tell(self, kind: str, *args: str | bool | None) -> None:
        if self._others is not None:
            self._others.publish(kind, *args)

    def _add_call(self, trace_id: str, span_id: str | None) -> None:
        for _ in range(_DEEPEST):
            if span_id is None:
                return
            self._around[(trace_id, span_id)] = True
            span_id = self._outer.get((trace_id, span_id))

    def span_received(self, trace_id: str, span_id: str, outer: str | None) -> None:
        """A span came, with the one around it."""
        if outer is not None:
            self._add_span(trace_id, span_id, outer)
            self._tell("span", trace_id, span_id, outer)

    def _add_span(self, trace_id: str, span_id: str, outer: str) -> None:
        self._outer[(trace_id, span_id)] = outer
        if self.has_call_inside(trace_id, span_id):
            self._add_call(trace_id, outer)

    def turn_created(self, span: Span, response_id: str | None) -> None:
        """A span reports a call that nobody else has reported."""
        self._add_turn(span.trace_id, span.span_id, span.parent_span_id, response_id)
        self._tell("span's turn", span.trace_id, span.span_id, span.parent_span_id, response_id)

    def _add_turn(
        self, trace_id: str, span_id: str, outer: str | None, response_id: str | None
    ) -> None:
        self._turns[(trace_id, span_id)] = True
        if response_id is not None:
            self._turn_answers[(trace_id, response_id)] = span_id
        self._add_call(trace_id, outer)

    def turns_answered(self, turns: Sequence[Turn], *, inferred: bool) -> None:
        """Turns are about to be recorded, and then seen by the client. `inferred`: nobody named
        their rollout."""
        for turn in turns:
            answer_id = (turn.response or {}).get("id")
            known = answer_id if isinstance(answer_id, str) and answer_id else None
            self._add_answer(turn.turn_id, turn.rollout_id, known, inferred)
            self._tell("answer", turn.turn_id, turn.rollout_id, known, inferred)

    def turns_moved(self, turns: Sequence[Turn]) -> None:
        """Of `turns_answered`: they belong to another rollout, which nobody named either."""
        for turn in turns:
            answer_id = (turn.response or {}).get("id")
            known = answer_id if isinstance(answer_id, str) and answer_id else None
            self._move_answer(turn.turn_id, turn.rollout_id, known)
            self._tell("answer moved", turn.turn_id, turn.rollout_id, known)

    def _move_answer(self, turn_id: str, rollout_id: str, answer_id: str | None) -> None:
        if answer_id is not None and self._answers.get(answer_id) != _SEVERAL:
            self._answers[answer_id] = rollout_id
        self._answers[turn_id] = rollout_id
        self._inferred[rollout_id] = True

    def _add_answer(
        self, turn_id: str, rollout_id: str, answer_id: str | None, inferred: bool
    ) -> None:
        self._answers[turn_id] = rollout_id
        if answer_id is not None:
            # Engines take ids from requests: one of several rollouts says nothing.
            known = self._answers.get(answer_id)
            self._answers[answer_id] = rollout_id if known in (None, rollout_id) else _SEVERAL
        if inferred:
            self._inferred[rollout_id] = True

    def has_call_inside(self, trace_id: str, span_id: str) -> bool:
        """Whether a call was made in the span, or in one inside it."""
        return self._around.get((trace_id, span_id)) is not None

    def is_duplicate(self, span: Span, response_id: str | None) -> bool:
        """Whether another span of its trace became a turn for the same call: one around it, or
        one with the same answer. Two libraries report it."""
        trace_id = span.trace_id
        if response_id is not None:
            answered = self._turn_answers.get((trace_id, response_id))
            if answered is not None and answered != span.span_id:
                return True
        outer = span.parent_span_id
        for _ in range(_DEEPEST):
            if outer is None:
                return False
            if self._turns.get((trace_id, outer)) is not None:
                return True
            outer = self._outer.get((trace_id, outer))
        return False

    def rollout_of_response(self, response_id: str | None) -> str | None:
        """The rollout of the turn that was answered with this id, or has it itself."""
        if response_id is None:
            return None
        found = self._answers.get(response_id) or self._answers.get(_turn_id_in(response_id))
        return None if found == _SEVERAL else found

    def was_inferred(self, rollout_id: str) -> bool:
        """Whether the rollout was made for calls without a name."""
        return self._inferred.get(rollout_id) is not None


def turn_id_in_response(response_id: str | None) -> str | None:
    """The id of the turn that an answer's id may have been made of."""
    if response_id is None:
        return None
    turn_id = _turn_id_in(response_id)
    named = len(turn_id) == 32 and all(digit in "0123456789abcdef" for digit in turn_id)
    return turn_id if named else None


def _turn_id_in(response_id: str) -> str:
    for prefix in _ID_PREFIXES:
        response_id = response_id.removeprefix(prefix)
    return response_id
