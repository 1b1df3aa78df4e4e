"""Gemini requests as canonical calls, in few words."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.gemini.request import GeminiDialect
from tracegrad.proxy.http.errors import BadRequest

Json = dict[str, Any]

WHOLE = {"model": "m", "method": "generateContent"}
STREAMED = {"model": "m", "method": "streamGenerateContent"}
HI = {"role": "user", "parts": [{"text": "hi"}]}
USER = {"role": "user", "content": "hi"}


def parse(path: Json = WHOLE, query: dict[str, str] | None = None, **fields: Any) -> Call:
    return GeminiDialect().parse(orjson.dumps({"contents": [HI], **fields}), path, query or {})


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    return caught.value
