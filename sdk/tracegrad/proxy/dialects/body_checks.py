"""What the dialects check alike: that a body is JSON, and the types that the proxy relies on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from tracegrad.events import Json
from tracegrad.proxy.http.errors import BadRequest

Kind = tuple[type | tuple[type, ...], str]

# orjson writes 254 levels; canonical form may nest deeper than the request did.
_MOST_LEVELS = 240
_DEEPER = 10

BOOL: Kind = (bool, "true or false")
INTEGER: Kind = (int, "an integer")
NUMBER: Kind = ((int, float), "a number")
STRING: Kind = (str, "a string")
OBJECT: Kind = (dict, "an object")


def json_object(raw: bytes) -> Json:
    """Raises BadRequest for a body that is no JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    if _brackets(raw) > _MOST_LEVELS:
        nested: Any = body
        for _ in range(_DEEPER):
            nested = [nested]
        try:
            orjson.dumps(nested)  # writes fewer levels than it reads
        except TypeError:
            raise BadRequest("the body nests too deep") from None
    return body


def _brackets(raw: bytes) -> int:
    """How many `[` and `{`, which differ in one bit: one look at each byte, not two."""
    return int(np.count_nonzero((np.frombuffer(raw, dtype=np.uint8) & 0xDF) == ord("[")))


def check_types(body: Json, kinds: Mapping[str, Kind]) -> None:
    """Raises BadRequest that names the first field of another kind; null is left out."""
    for name, (kind, words) in kinds.items():
        value = body.get(name)
        # bool is an int to Python, not to JSON.
        if value is not None and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ):
            raise BadRequest(f"{name} is not {words}", param=name)
