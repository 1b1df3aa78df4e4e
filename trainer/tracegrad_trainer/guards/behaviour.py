"""What a rollout's replies did, whatever reward they got: the shares that guards watch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from tracegrad.events import Json, Turn
from tracegrad.inspect.transcript import Message, ToolCall, Transcript

_QUESTION = re.compile(r"\?[\s\"'»”)\]]*$")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Of one rollout. None: there was no occasion for it (no tools, no text of a request)."""

    invalid_tool_calls: bool | None  # at least one: not JSON, no such tool, against its schema
    no_ops: bool | None  # a reply of nothing, or a call that repeats the one before it
    questions: bool | None  # it ends by asking, where it could have answered
    refusals: bool | None  # its last reply
    reply_tokens: int  # of its longest reply: who learns to take another turn is not verbose


def behaviour_of(turns: Sequence[Turn], refusals: Sequence[str]) -> Behaviour:
    """`turns`: with their requests and responses, in order of capture. `refusals`: regular
    expressions."""
    transcript = Transcript(turns)
    replies = [(index, transcript.reply(index)) for index in range(len(turns))]
    known = [(index, reply) for index, reply in replies if reply is not None]
    tokens = max((len(turn.completion_token_ids) for turn in turns), default=0)
    if not known:
        return Behaviour(None, None, None, None, tokens)
    last = known[-1][1]
    tools = [_tools(transcript, index) for index, _ in known]
    checks = [
        _is_invalid(call, offered)
        for (_, reply), offered in zip(known, tools, strict=True)
        for call in reply.calls
        if offered
    ]
    return Behaviour(
        invalid_tool_calls=any(checks) if any(tools) else None,
        no_ops=_has_no_op([reply for _, reply in known]),
        questions=not last.calls and _QUESTION.search(last.text) is not None,
        refusals=not last.calls and any(p.search(last.text) for p in _patterns(tuple(refusals))),
        reply_tokens=tokens,
    )


def _tools(transcript: Transcript, index: int) -> Mapping[str, Json]:
    """Name -> schema of the parameters, of the functions that the call offered."""
    call = transcript.call(index)
    body = {} if call is None else call.body
    found = {}
    for tool in body.get("tools") or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters") or {}
    return found


def _is_invalid(call: ToolCall, offered: Mapping[str, Json]) -> bool:
    if call.name not in offered:
        return True
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return True
    validator = _validator(json.dumps(offered[call.name], sort_keys=True))
    return validator is not None and not validator.is_valid(arguments)


@lru_cache(256)  # an agent may write another schema into each call
def _validator(schema: str) -> Any:
    """None: the agent's own schema is none, and nothing can be held against it."""
    parsed = json.loads(schema)
    try:
        Draft202012Validator.check_schema(parsed)
    except SchemaError:
        return None
    return Draft202012Validator(parsed)


def _has_no_op(replies: Sequence[Message]) -> bool:
    if any(not reply.calls and not reply.text.strip() for reply in replies):
        return True
    calls = list(_calls(replies))
    return any(one == other for one, other in pairwise(calls))


def _calls(replies: Sequence[Message]) -> Iterator[tuple[ToolCall, ...]]:
    """What was called, reply by reply; those without a call between them count too."""
    for number, reply in enumerate(replies):
        yield reply.calls or (ToolCall(f"reply {number}", ""),)


@cache
def _patterns(sources: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(source, re.IGNORECASE | re.MULTILINE) for source in sources)
