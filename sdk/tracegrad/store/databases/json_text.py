"""JSON columns hold text that every database accepts."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy.exc import DontWrapMixin

from tracegrad.store.encoding.blobs import dump_json
from tracegrad.store.errors import EventRejected


class NotSerializable(EventRejected, DontWrapMixin):
    """A value that JSON cannot say at all."""


def json_text(value: Any) -> str:
    """`value` as JSON that is valid by the letter: NaN and infinities become null.

    NUL and lone surrogates stay what they are: escapes, in columns of type `json`.
    """
    try:
        text = dump_json(value)
    except (RecursionError, TypeError, ValueError) as error:
        raise NotSerializable(f"{value!r:.60}: it is no JSON ({error})") from error
    if "NaN" in text or "Infinity" in text:  # Python's own writer leaves them, PostgreSQL refuses
        return json.dumps(json.loads(text, parse_constant=lambda _: None))
    return text
