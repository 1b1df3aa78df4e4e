"""JSON objects of the format back into what was stored. The inverse of `objects`.

Every function raises `BadObject`, which names the field. Nothing is guessed: a field that the
format does not have is refused too, since it would be lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Literal, TypeVar

from tracegrad.events import (
    Outcome,
    RewardGiven,
    RolloutFinished,
    SpanEnded,
    Turn,
    VersionSpans,
    token_ids,
)
from tracegrad.store.copy.export_records import Fate, RolloutCopy, VersionCopy
from tracegrad.store.encoding.routed_experts import check_routes
from tracegrad.store.types import PolicyVersion, StepRecord
from tracegrad.transfer.chat_conversations import Teacher, is_teacher, read_teacher
from tracegrad.transfer.field_reader import BadObject, Fields
from tracegrad.transfer.serialize import FORMAT

Read = RolloutCopy | Teacher | StepRecord | VersionCopy | SpanEnded
T = TypeVar("T")

_State = Literal["pushing", "serving", "failed"]
_STATES: dict[str, _State] = {"pushing": "pushing", "serving": "serving", "failed": "failed"}


def read_object(value: object) -> Read:
    """Whatever one line of an export holds, or a conversation (`teacher`)."""
    fields = Fields(value)
    if is_teacher(fields):
        return read_teacher(fields)
    version = fields.any("tracegrad")
    if version is None:
        raise BadObject("tracegrad", _not_ours(fields))
    if version != FORMAT:
        raise BadObject(
            "tracegrad", f"format {version!r}; this tracegrad reads {FORMAT}: update it"
        )
    kind = fields.text("kind")
    if kind not in _READERS:
        raise BadObject("kind", f"{kind!r}; write one of {', '.join(_READERS)}")
    read = _READERS[kind](fields)
    fields.done()
    return read


def _not_ours(fields: Fields) -> str:
    if fields.any("turn_id") is not None:
        return "this is a turn of `export --turns`, which is no whole copy; use `export --rollouts`"
    return 'it is missing; import what `export --rollouts` wrote, or objects with "messages"'


def _rollout(fields: Fields) -> RolloutCopy:
    rollout_id = fields.text("rollout_id")
    turns = _Turns(rollout_id)
    for each in fields.objects("turns"):
        turns.read(each)
        each.done()
    outcome = fields.text_or_none("outcome")
    if outcome is not None:
        fields.one_of("outcome", Outcome, ", ".join(Outcome))
    finished_at = fields.number_or_none("finished_at")
    if (outcome is None) != (finished_at is None):
        raise fields.bad("finished_at", "it goes with outcome; write both or neither")
    return RolloutCopy(
        rollout_id=rollout_id,
        opened=fields.flag("opened", True),
        opened_at=fields.number("opened_at"),
        task_id=fields.text_or_none("task_id"),
        agent=fields.text_or_none("agent"),
        tags=fields.texts("tags"),
        task=fields.any("task"),
        outcome=outcome,
        error=fields.text_or_none("error"),
        finished_at=finished_at,
        consumed_at=fields.number_or_none("consumed_at"),
        consumed_step=fields.integer_or_none("consumed_step"),
        outcomes=_all(fields, "outcomes", lambda each: _end(each, rollout_id)),
        rewards=_all(fields, "rewards", lambda each: _reward(each, rollout_id)),
        spans=_all(fields, "spans", lambda each: _span(each, rollout_id)),
        turns=turns.turns,
        fates=turns.fates,
    )


def _all(fields: Fields, field: str, read: Callable[[Fields], T]) -> list[T]:
    found = []
    for each in fields.objects(field):
        found.append(read(each))
        each.done()
    return found


def _end(fields: Fields, rollout_id: str) -> RolloutFinished:
    return RolloutFinished(
        rollout_id=rollout_id,
        outcome=fields.one_of("outcome", Outcome, ", ".join(Outcome)),
        error=fields.text_or_none("error"),
        finished_at=fields.number("finished_at"),
    )


def _reward(fields: Fields, rollout_id: str) -> RewardGiven:
    return RewardGiven(
        reward_id=fields.text("reward_id"),
        rollout_id=rollout_id,
        value=fields.reward("value"),
        name=fields.text("name"),
        turn=fields.integer_or_none("turn"),
        source=fields.text("source"),
        label=fields.text_or_none("label"),
        given_at=fields.number_or_none("given_at"),
        created_at=fields.number("created_at"),
    )


def _span(fields: Fields, rollout_id: str | None) -> SpanEnded:
    return SpanEnded(
        trace_id=fields.text("trace_id"),
        span_id=fields.text("span_id"),
        parent_span_id=fields.text_or_none("parent_span_id"),
        rollout_id=rollout_id,
        name=fields.text_or_none("name") or "",
        kind=fields.text("kind"),
        start_ns=fields.integer("start_ns"),
        end_ns=fields.integer("end_ns"),
        status=fields.text("status"),
        attributes=fields.object("attributes"),
    )


def _lone_span(fields: Fields) -> SpanEnded:
    inner = Fields(fields.any("span"), "span")
    span = _span(inner, None)
    inner.done()
    return span


def _step(fields: Fields) -> StepRecord:
    return StepRecord(
        step=fields.integer("step"),
        version=fields.integer("version"),
        created_at=fields.number("created_at"),
        settings=fields.object("settings"),
        metrics=fields.object("metrics"),
        checkpoint=fields.text_or_none("checkpoint"),
        batch=fields.object_or_none("batch"),
        run_id=fields.text_or_none("run_id"),
        manifest_digest=fields.text_or_none("manifest_digest"),
        parent_digest=fields.text_or_none("parent_digest"),
    )


def _version(fields: Fields) -> VersionCopy:
    number = fields.integer("version")
    return VersionCopy(
        _standing(fields, number),
        _all(fields, "events", lambda each: _standing(each, number)),
    )


def _standing(fields: Fields, version: int) -> PolicyVersion:
    state = fields.text("state")
    if state not in _STATES:
        raise fields.bad("state", f"{state!r}; write one of {', '.join(_STATES)}")
    return PolicyVersion(
        version=version,
        step=fields.integer_or_none("step"),
        state=_STATES[state],
        created_at=fields.number("created_at"),
        detail=fields.object("detail"),
    )


_READERS: dict[str, Callable[[Fields], Read]] = {
    "rollout": _rollout,
    "step": _step,
    "version": _version,
    "span": _lone_span,
}


class _Turns:
    """The turns of one rollout, read in order: parents come before their children."""

    def __init__(self, rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._contexts: dict[str, array[int]] = {}
        self.turns: list[Turn] = []
        self.fates: dict[str, Fate] = {}

    def read(self, fields: Fields) -> None:
        turn_id = fields.text("turn_id")
        if turn_id in self._contexts:
            raise fields.bad("turn_id", f"{turn_id!r} is there twice; give each turn its own")
        prompt = self._prompt(fields)
        completion = fields.ids("completion_token_ids")
        context = prompt + completion
        self.turns.append(
            Turn(
                turn_id=turn_id,
                rollout_id=self._rollout_id,
                parent_id=fields.text_or_none("parent_turn_id"),
                fork_reason=fields.text_or_none("fork_reason"),
                dialect=fields.text("dialect"),
                model=fields.text_or_none("model") or "",
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                completion_logprobs=_logprobs(fields, len(completion)),
                policy_versions=_versions(fields, len(completion)),
                sampling=fields.object("sampling"),
                finish_reason=fields.text_or_none("finish_reason"),
                untrainable=fields.text_or_none("untrainable"),
                parent_span_id=fields.text_or_none("parent_span_id"),
                request=fields.object_or_none("request"),
                response=fields.object_or_none("response"),
                state_key=fields.text_or_none("state_key"),
                observation=fields.text_or_none("observation"),
                routed_experts=_routes(fields, len(context)),
                created_at=fields.number("created_at"),
            )
        )
        self._contexts[turn_id] = context
        if (fate := _fate(fields)) is not None:
            self.fates[turn_id] = fate

    def _prompt(self, fields: Fields) -> array[int]:
        parent = fields.text_or_none("parent_turn_id")
        if parent is None:
            known = token_ids()
        elif parent in self._contexts:
            known = self._contexts[parent]
        else:
            raise fields.bad(
                "parent_turn_id", f"turn {parent!r} is not before it; write parents first"
            )
        return known + fields.ids("new_token_ids")


def _logprobs(fields: Fields, tokens: int) -> array[float]:
    found = fields.logprobs("completion_logprobs")
    if len(found) != tokens:
        raise fields.bad(
            "completion_logprobs", f"{len(found)} for {tokens} sampled tokens; write one each"
        )
    return found


def _versions(fields: Fields, tokens: int) -> VersionSpans:
    spans = []
    for index, span in enumerate(fields.items("policy_versions")):
        if not (isinstance(span, list) and [type(n) for n in span] == [int, int] and span[1] > 0):
            raise fields.bad(f"policy_versions[{index}]", f"{span!r}; write [version, count]")
        spans.append((span[0], span[1]))
    if (covered := sum(count for _, count in spans)) != tokens:
        raise fields.bad(
            "policy_versions", f"they cover {covered} of {tokens} sampled tokens; cover all"
        )
    return tuple(spans)


def _routes(fields: Fields, tokens: int) -> bytes | None:
    file = fields.file_or_none("routed_experts")
    if file is not None:
        try:
            check_routes(file, tokens)
        except ValueError as error:
            raise fields.bad("routed_experts", f"{error}; leave it out") from None
    return file


def _fate(fields: Fields) -> Fate | None:
    step = fields.integer_or_none("trained_step")
    reason = fields.text_or_none("skip_reason")
    at = fields.number_or_none("fate_at")
    if step is not None and reason is not None:
        raise fields.bad("skip_reason", "the turn was trained; write one of the two")
    if step is None and reason is None:
        return None
    if at is None:
        raise fields.bad("fate_at", "it is missing; write when the turn was trained or skipped")
    return Fate(step, reason, at)
