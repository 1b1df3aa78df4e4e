"""Reasoning in the items of the Responses API.

A client that keeps the conversation itself asks for `reasoning.encrypted_content` and sends it
back; Codex sends back nothing else of the reasoning. What it gets is the text itself in base64:
it has seen the text in the item's `content` already, so there is nothing to hide.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode

from tracegrad.events import Json
from tracegrad.proxy.dialects.body_checks import STRING
from tracegrad.proxy.dialects.openai_responses.field_checks import (
    LIST,
    an_object,
    optional,
    refusal,
    required,
)

ASKED_FOR = "reasoning.encrypted_content"
_MARK = "tg1."


def sealed(text: str) -> str:
    return _MARK + b64encode(text.encode()).decode()


def text_of(item: Json, where: str) -> str:
    """A reasoning item's text: its content, else what was sealed, else its summary.

    Empty when it has none of these. Raises BadRequest, also for content that somebody else
    encrypted and that nothing else stands in for.
    """
    content = _texts(item, "content", where)
    if content:
        return "".join(content)
    summary = "\n".join(_texts(item, "summary", where))
    encrypted = optional(item, "encrypted_content", STRING, where)
    if encrypted and (encrypted.startswith(_MARK) or not summary):
        return _opened(encrypted, f"{where}.encrypted_content")
    return summary


def _texts(item: Json, name: str, where: str) -> list[str]:
    parts = optional(item, name, LIST, where) or []
    return [
        required(an_object(part, f"{where}.{name}[{index}]"), "text", STRING, f"{where}.{name}")
        for index, part in enumerate(parts)
    ]


def _opened(encrypted: str, where: str) -> str:
    try:
        if not encrypted.startswith(_MARK):
            raise ValueError
        return b64decode(encrypted[len(_MARK) :], validate=True).decode()
    except (ValueError, binascii.Error):
        raise refusal(
            f"'{where}' was not made here and cannot be read. Leave it out, or give the text "
            "in 'content'.",
            where,
            code="invalid_encrypted_content",
        ) from None
