"""The objects of the format, version 1 (docs/transfer.md): one schema for reading, for writing and
for Parquet's columns.

What is read is checked against the types; a field that the format does not have is refused, since
it would be lost. Fields are written in the order in which they stand here. A description says what
to write: errors quote it as the fix.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tracegrad.events import MAX_REWARD, REWARD_RANGE, Json, Outcome

FORMAT = 1
# In copies only where there is a value: older readers refuse fields that they do not know.
OMITTED_IF_NONE = frozenset(
    {
        *("label", "given_at", "comment", "state_key", "observation", "timing", "routed_experts"),
        *("idle_s", "continues", "held_out", "agent_name", "asked_model", "advantage"),
    }
)

_MAX_INTEGER = 2**63 - 1

Text = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Integer = Annotated[
    int, Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER, description="a whole number of 64 bits")
]
# The bounds refuse infinities and NaN.
Number = Annotated[
    float, Meta(ge=-sys.float_info.max, le=sys.float_info.max, description="a finite number")
]
# Years 1 to 9999.
Time = Annotated[
    float,
    Meta(
        ge=-62_135_596_800,
        lt=253_402_300_800,
        description="a time in seconds since 1970, before the year 10000",
    ),
]
RewardValue = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD, description=REWARD_RANGE)]
TokenIds = list[Annotated[int, Meta(ge=0, le=2**31 - 1, description="a token id, 0 to 2^31 - 1")]]
Logprobs = list[Annotated[float | None, Meta(description="a number or null")]]
_Count = Annotated[int, Meta(ge=1, description="how many tokens, 1 or more")]
PolicyVersions = list[Annotated[tuple[Integer, _Count], Meta(description="[version, count]")]]
VersionState = Literal["pushing", "serving", "failed"]
Base64 = Annotated[bytes, Meta(description="the file's bytes as base64")]


class _Object(Struct, forbid_unknown_fields=True):
    """Null means the same as a missing field."""


class OutcomeObject(_Object, kw_only=True):
    outcome: Outcome
    error: str | None = None
    finished_at: Time


class RewardObject(_Object, kw_only=True):
    reward_id: Text
    value: RewardValue | None
    name: Text
    turn: Integer | None = None
    source: Text
    created_at: Time
    label: str | None = None
    given_at: Time | None = None
    comment: str | None = None


class SpanObject(_Object, kw_only=True):
    trace_id: Text
    span_id: Text
    parent_span_id: str | None = None
    name: str | None = None
    kind: Text
    start_ns: Integer
    end_ns: Integer
    status: Text
    attributes: Json | None = None


class TurnObject(_Object, kw_only=True):
    """`new_token_ids`: what the prompt has beyond the parent's prompt and completion."""

    turn_id: Text
    parent_turn_id: str | None = None
    fork_reason: str | None = None
    dialect: Text
    model: str | None = None
    new_token_ids: TokenIds | None = None
    completion_token_ids: TokenIds | None = None
    completion_logprobs: Logprobs | None = None
    policy_versions: PolicyVersions | None = None
    sampling: Json | None = None
    finish_reason: str | None = None
    untrainable: str | None = None
    parent_span_id: str | None = None
    created_at: Time
    trained_step: Integer | None = None
    skip_reason: str | None = None
    fate_at: Time | None = None
    advantage: Number | None = None
    state_key: str | None = None
    observation: str | None = None
    timing: Json | None = None
    agent_name: str | None = None
    asked_model: str | None = None
    routed_experts: Base64 | None = None
    request: Json | None = None
    response: Json | None = None


class _Line(_Object, kw_only=True):
    """What a line of a file begins with: FORMAT, and what it holds."""

    tracegrad: Integer
    kind: str


class RolloutObject(_Line, kw_only=True):
    rollout_id: Text
    opened: bool | None = None
    opened_at: Time
    task_id: str | None = None
    agent: str | None = None
    tags: dict[str, str] | None = None
    task: Any = None
    outcome: Outcome | None = None
    error: str | None = None
    finished_at: Time | None = None
    consumed_at: Time | None = None
    consumed_step: Integer | None = None
    idle_s: Number | None = None
    continues: str | None = None
    held_out: bool | None = None
    outcomes: list[OutcomeObject] | None = None
    rewards: list[RewardObject] | None = None
    spans: list[SpanObject] | None = None
    turns: list[TurnObject] | None = None


class StepObject(_Line, kw_only=True):
    step: Integer
    version: Integer
    created_at: Time
    settings: Json | None = None
    metrics: Json | None = None
    checkpoint: str | None = None
    batch: Json | None = None
    run_id: str | None = None
    manifest_digest: str | None = None
    parent_digest: str | None = None


class VersionEventObject(_Object, kw_only=True):
    step: Integer | None = None
    state: VersionState
    created_at: Time
    detail: Json | None = None


class VersionObject(_Line, kw_only=True):
    version: Integer
    step: Integer | None = None
    state: VersionState
    created_at: Time
    detail: Json | None = None
    events: list[VersionEventObject] | None = None


class SpanWithoutRolloutObject(_Line, kw_only=True):
    span: SpanObject


class FlatTurnObject(_Object, kw_only=True):
    """A row of `export --turns`, with its whole prompt; it is only written.

    `agent_name`: as in a copy, or else as spans around the call say
    (`RolloutRecord.without_spans`).
    """

    turn_id: Text
    parent_turn_id: str | None
    rollout_id: Text
    task_id: str | None
    agent: str | None
    outcome: str | None
    reward: float | None
    dialect: Text
    model: str
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    completion_logprobs: Logprobs
    policy_versions: PolicyVersions
    finish_reason: str | None
    created_at: float
    trained_step: int | None
    skip_reason: str | None
    untrainable: str | None
    fork_reason: str | None
    agent_name: str | None
    asked_model: str | None
    advantage: float | None


class FunctionObject(Struct):
    name: Text


class ToolCallObject(Struct):
    function: FunctionObject


class MessageObject(Struct, kw_only=True):
    role: Text
    content: Annotated[
        str | list[Any] | None, Meta(description="a text, a list of parts or null")
    ] = None
    tool_calls: list[ToolCallObject] | None = None


class ConversationObject(Struct, kw_only=True):
    """A conversation from elsewhere. Other fields belong to its task."""

    messages: list[MessageObject]
    tools: Any = None
    rollout_id: str | None = None
    task_id: str | None = None
    agent: str | None = None
    tags: dict[str, str] | None = None
    task: Any = None
    model: str | None = None
    reward: RewardValue | None = None
    created_at: Time | None = None
