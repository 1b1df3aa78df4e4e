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
    Reward,
    RolloutFinished,
    Span,
    Turn,
    VersionSpans,
    token_id_array,
)
from tracegrad.store.copy.export_records import RolloutRecord, VersionRecord
from tracegrad.store.encoding.routed_experts import check_routing
from tracegrad.store.types import PolicyVersion, StepRecord, TurnDisposition
from tracegrad.transfer.chat_conversations import (
    ImportedConversation,
    is_conversation,
    read_conversation,
)
from tracegrad.transfer.serialize import FORMAT
from tracegrad.transfer.validation import FieldReader, InvalidObject

ImportedObject = RolloutRecord | ImportedConversation | StepRecord | VersionRecord | Span
T = TypeVar("T")

_State = Literal["pushing", "serving", "failed"]
_STATES: dict[str, _State] = {"pushing": "pushing", "serving": "serving", "failed": "failed"}


def read_object(value: object) -> ImportedObject:
    """Whatever one line of an export holds, or a conversation (`teacher`)."""
    fields = FieldReader(value)
    if is_conversation(fields):
        return read_conversation(fields)
    version = fields.any("tracegrad")
    if version is None:
        raise InvalidObject("tracegrad", _not_ours(fields))
    if version != FORMAT:
        raise InvalidObject(
            "tracegrad", f"format {version!r}; this tracegrad reads {FORMAT}: update it"
        )
    kind = fields.text("kind")
    if kind not in _READERS:
        raise InvalidObject("kind", f"{kind!r}; write one of {', '.join(_READERS)}")
    read = _READERS[kind](fields)
    fields.refuse_unread()
    return read


def _not_ours(fields: FieldReader) -> str:
    if fields.any("turn_id") is not None:
        return "this is a turn of `export --turns`, which is no whole copy; use `export --rollouts`"
    return 'it is missing; import what `export --rollouts` wrote, or objects with "messages"'


def _rollout(fields: FieldReader) -> RolloutRecord:
    rollout_id = fields.text("rollout_id")
    turns = _Turns(rollout_id)
    for each in fields.objects("turns"):
        turns.read(each)
        each.refuse_unread()
    outcome = fields.text_or_none("outcome")
    if outcome is not None:
        fields.one_of("outcome", Outcome, ", ".join(Outcome))
    finished_at = fields.number_or_none("finished_at")
    if (outcome is None) != (finished_at is None):
        raise fields.invalid("finished_at", "it goes with outcome; write both or neither")
    return RolloutRecord(
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
        dispositions=turns.fates,
    )


def _all(fields: FieldReader, field: str, read: Callable[[FieldReader], T]) -> list[T]:
    found = []
    for each in fields.objects(field):
        found.append(read(each))
        each.refuse_unread()
    return found


def _end(fields: FieldReader, rollout_id: str) -> RolloutFinished:
    return RolloutFinished(
        rollout_id=rollout_id,
        outcome=fields.one_of("outcome", Outcome, ", ".join(Outcome)),
        error=fields.text_or_none("error"),
        finished_at=fields.number("finished_at"),
    )


def _reward(fields: FieldReader, rollout_id: str) -> Reward:
    return Reward(
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


def _span(fields: FieldReader, rollout_id: str | None) -> Span:
    return Span(
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


def _lone_span(fields: FieldReader) -> Span:
    inner = FieldReader(fields.any("span"), "span")
    span = _span(inner, None)
    inner.refuse_unread()
    return span


def _step(fields: FieldReader) -> StepRecord:
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


def _version(fields: FieldReader) -> VersionRecord:
    number = fields.integer("version")
    return VersionRecord(
        _version_state(fields, number),
        _all(fields, "events", lambda each: _version_state(each, number)),
    )


def _version_state(fields: FieldReader, version: int) -> PolicyVersion:
    state = fields.text("state")
    if state not in _STATES:
        raise fields.invalid("state", f"{state!r}; write one of {', '.join(_STATES)}")
    return PolicyVersion(
        version=version,
        step=fields.integer_or_none("step"),
        state=_STATES[state],
        created_at=fields.number("created_at"),
        detail=fields.object("detail"),
    )


_READERS: dict[str, Callable[[FieldReader], ImportedObject]] = {
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
        self.fates: dict[str, TurnDisposition] = {}

    def read(self, fields: FieldReader) -> None:
        turn_id = fields.text("turn_id")
        if turn_id in self._contexts:
            raise fields.invalid("turn_id", f"{turn_id!r} is there twice; give each turn its own")
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
                routed_experts=_routing(fields, len(context)),
                created_at=fields.number("created_at"),
            )
        )
        self._contexts[turn_id] = context
        if (fate := _disposition(fields)) is not None:
            self.fates[turn_id] = fate

    def _prompt(self, fields: FieldReader) -> array[int]:
        parent = fields.text_or_none("parent_turn_id")
        if parent is None:
            known = token_id_array()
        elif parent in self._contexts:
            known = self._contexts[parent]
        else:
            raise fields.invalid(
                "parent_turn_id", f"turn {parent!r} is not before it; write parents first"
            )
        return known + fields.ids("new_token_ids")


def _logprobs(fields: FieldReader, tokens: int) -> array[float]:
    found = fields.logprobs("completion_logprobs")
    if len(found) != tokens:
        raise fields.invalid(
            "completion_logprobs", f"{len(found)} for {tokens} sampled tokens; write one each"
        )
    return found


def _versions(fields: FieldReader, tokens: int) -> VersionSpans:
    spans = []
    for index, span in enumerate(fields.items("policy_versions")):
        if not (isinstance(span, list) and [type(n) for n in span] == [int, int] and span[1] > 0):
            raise fields.invalid(f"policy_versions[{index}]", f"{span!r}; write [version, count]")
        spans.append((span[0], span[1]))
    if (covered := sum(count for _, count in spans)) != tokens:
        raise fields.invalid(
            "policy_versions", f"they cover {covered} of {tokens} sampled tokens; cover all"
        )
    return tuple(spans)


def _routing(fields: FieldReader, tokens: int) -> bytes | None:
    file = fields.file_or_none("routed_experts")
    if file is not None:
        try:
            check_routing(file, tokens)
        except ValueError as error:
            raise fields.invalid("routed_experts", f"{error}; leave it out") from None
    return file


def _disposition(fields: FieldReader) -> TurnDisposition | None:
    step = fields.integer_or_none("trained_step")
    reason = fields.text_or_none("skip_reason")
    at = fields.number_or_none("fate_at")
    if step is not None and reason is not None:
        raise fields.invalid("skip_reason", "the turn was trained; write one of the two")
    if step is None and reason is None:
        return None
    if at is None:
        raise fields.invalid("fate_at", "it is missing; write when the turn was trained or skipped")
    return TurnDisposition(step, reason, at)
