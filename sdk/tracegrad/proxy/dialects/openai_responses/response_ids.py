"""Ids that clients of the Responses API see, made of the turn's id, and the turn read off them.

resp_<turn>   rs_<turn>   msg_<turn>   fc_<turn>   fc_<turn>_1   ctc_<turn>
"""

from __future__ import annotations

import re

_RESPONSE = re.compile(r"resp_([0-9a-f]{32})")
_ITEM = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_\d+)?")


def response_id(turn_id: str) -> str:
    return f"resp_{turn_id}"


def item_id(prefix: str, turn_id: str, number: int) -> str:
    """`number` counts the turn's items with this prefix from 0."""
    return f"{prefix}_{turn_id}_{number}" if number else f"{prefix}_{turn_id}"


def turn_of_response(value: str) -> str | None:
    """The turn that answered so; None for an id that is not of this proxy."""
    found = _RESPONSE.fullmatch(value)
    return found[1] if found else None


def turn_of_item(value: object) -> str | None:
    found = _ITEM.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None
