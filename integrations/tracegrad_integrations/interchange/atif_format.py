"""The fields of ATIF, Harbor's Agent Trajectory Interchange Format, version 1.

Written is 1.7, the first with embedded trajectories and `llm_call_count`; read is every 1.x.
What ATIF has no field for stands in an `extra`, below `OURS`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tracegrad.events import Json
from tracegrad.transfer.schema import Number, Text, TokenIds

VERSION = "ATIF-v1.7"
READ_VERSIONS = "ATIF-v1."
OURS = "tracegrad"  # the key in an `extra`

# Parts with media stand in lists: {"type": "image", "source": {"path": ...}}.
Content = Annotated[str | list[Any], Meta(description="a text or a list of parts")]


class _Fields(Struct, omit_defaults=True):
    pass


class AtifToolCall(_Fields, kw_only=True):
    tool_call_id: str
    function_name: Text
    arguments: Json
    extra: Json | None = None


class AtifResult(_Fields, kw_only=True):
    """`source_call_id`: a tool call of the same step, or None."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[Json] | None = None
    extra: Json | None = None


class AtifObservation(_Fields, kw_only=True):
    results: list[AtifResult]


class AtifMetrics(_Fields, kw_only=True):
    """`prompt_token_ids` is the whole prompt, history included."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: TokenIds | None = None
    completion_token_ids: TokenIds | None = None
    logprobs: list[Number] | None = None
    extra: Json | None = None


class AtifStep(_Fields, kw_only=True):
    """`is_copied_context`: it is another trajectory's, or nobody's, and only context here.
    `llm_call_count` 0: the agent acted without a model."""

    step_id: int
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: Any = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: Json | None = None


class AtifAgent(_Fields, kw_only=True):
    """`tool_definitions` as chat completions have them. ATIF wants a version; many leave it out."""

    name: str
    version: str | None = None
    model_name: str | None = None
    tool_definitions: list[Json] | None = None
    extra: Json | None = None


class AtifFinalMetrics(_Fields, kw_only=True):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_steps: int | None = None
    extra: Json | None = None


class AtifTrajectory(_Fields, kw_only=True):
    schema_version: Text
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: Annotated[list[AtifStep], Meta(min_length=1, description="a list of one step or more")]
    notes: str | None = None
    final_metrics: AtifFinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Json | None = None
    subagent_trajectories: list[AtifTrajectory] | None = None


# Of a table, with one row a trajectory.
COLUMNS = {
    "schema_version": "text",
    "session_id": "text",
    "trajectory_id": "text",
    "agent": "json",
    "steps": "json",
    "notes": "text",
    "final_metrics": "json",
    "extra": "json",
    "subagent_trajectories": "json",
}

# What of a trajectory has a place in a rollout; the rest of it is kept beside.
_STEP: Json = {
    **dict.fromkeys(("step_id", "timestamp", "source", "model_name", "message"), True),
    **dict.fromkeys(("reasoning_content", "is_copied_context", "llm_call_count"), True),
    "tool_calls": [
        {"tool_call_id": True, "function_name": True, "arguments": True, "extra": {OURS: True}}
    ],
    "observation": {
        "results": [{"source_call_id": True, "content": True, "extra": {OURS: True}}],
    },
    "metrics": {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "prompt_token_ids"), True),
        **dict.fromkeys(("completion_token_ids", "logprobs"), True),
        "extra": {OURS: True},
    },
    "extra": {OURS: True},
}
PLACED: Json = {
    **dict.fromkeys(("schema_version", "session_id", "trajectory_id"), True),
    "agent": {"name": True, "model_name": True, "tool_definitions": True},
    "steps": [_STEP],
    "extra": {OURS: True, "reward": True, "task_id": True},
}
# Embedded ones have no id and reward of their own in a rollout. Their agent is their turns', and
# kept beside them too: not every one has a turn.
_EMBEDDED: Json = {
    "schema_version": True,
    "agent": {"model_name": True, "tool_definitions": True},
    "steps": [_STEP],
}
PLACED["subagent_trajectories"] = _EMBEDDED["subagent_trajectories"] = [_EMBEDDED]


def unplaced(value: Any, placed: Any = PLACED) -> Any:
    """What of the value has no place; None: nothing. Of lists, by the items' numbers."""
    if placed is True or value is None:
        return None
    rest: Json = {}
    if isinstance(placed, dict) and isinstance(value, dict):
        rest = {key: unplaced(item, placed.get(key)) for key, item in value.items()}
    elif isinstance(placed, list) and isinstance(value, list):
        rest = {str(at): unplaced(item, placed[0]) for at, item in enumerate(value)}
    else:
        return value
    return {key: item for key, item in rest.items() if item is not None} or None
