"""Columns of JSON: as text that every database takes, and back."""

from __future__ import annotations

import json
from typing import Any

import orjson
from sqlalchemy.exc import DontWrapMixin

from tracegrad.jsonutil import dump_json
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


# orjson reads an integer beyond 64 bits as a float. A regular expression would take longer than
# either reader does.
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19


def json_value(text: str | bytes) -> Any:
    """As Python's own reader reads it, several times as fast. SQLite gives a JSON number back as a
    number, and SQLAlchemy wants the TypeError that it makes of that."""
    if isinstance(text, str | bytes):
        try:
            written = text.encode() if isinstance(text, str) else text
            if _LONG_NUMBER not in written.translate(_DIGITS):
                return orjson.loads(written)
        except ValueError:  # NaN, lone surrogates, numbers beyond floats
            pass
    return json.loads(text)
