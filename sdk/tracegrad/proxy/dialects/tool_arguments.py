"""Arguments of tool calls where a dialect carries objects, and models write text.

What a model wrote goes out as it is, where it is a JSON object. Where it is none (cut short, a
list, no JSON at all) nothing is repaired: it goes out as `{"INVALID_JSON": "<what it wrote>"}`,
Anthropic's convention, which fails the tool's own check with the text in it. Both come back as
the text that the model wrote, though perhaps spelled differently where it is an object. Integers
of more than 64 bits come back as floats.
"""

from __future__ import annotations

from typing import Any

import orjson

INVALID = "INVALID_JSON"
# Claude Code's own, for calls that it got in a stream: {"raw": the text's first 2,048 characters,
# "len": how many it has}, as JavaScript counts them.
_UNPARSED = "__unparsedToolInput"


def is_object(arguments: str) -> bool:
    """Whether a tool call's arguments are a JSON object. None at all are an empty one."""
    if not arguments.strip():
        return True
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


def as_object(arguments: str) -> Any:
    """For orjson: the object, spelled as the model spelled it, on one line."""
    if not is_object(arguments):
        return {INVALID: arguments}
    # Line ends are not part of any JSON string; in an event they would end its data.
    one_line = arguments.replace("\r", " ").replace("\n", " ").strip()
    return orjson.Fragment(one_line or "{}")


def as_text(value: Any) -> str:
    """The arguments of a call that a client sends back. `value` is any JSON that orjson read."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, inner),) = value.items()
        if name == INVALID and isinstance(inner, str):
            return inner
        if name == _UNPARSED and (raw := _unparsed(inner)) is not None:
            return raw
    return orjson.dumps(value).decode()


def _unparsed(inner: Any) -> str | None:
    raw = inner.get("raw") if isinstance(inner, dict) else None
    if not isinstance(raw, str) or not raw:
        return None
    whole = inner.get("len") == len(raw.encode("utf-16-le")) // 2
    return raw if whole else None
