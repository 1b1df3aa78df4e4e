"""Reading one field of a Responses request: its type, its presence, and how a refusal names it.

Codes and wording are those of OpenAI's own refusals, since clients look at `error.code`.
"""

from __future__ import annotations

from typing import Any

from tracegrad.events import Json
from tracegrad.proxy.dialects.body_checks import OBJECT, Kind
from tracegrad.proxy.http.errors import BadRequest

LIST: Kind = (list, "a list")


def refusal(message: str, param: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(message, param=param, code=code)


def an_object(value: object, where: str) -> Json:
    """Raises BadRequest for anything but a JSON object."""
    if not isinstance(value, dict):
        raise _wrong_type(where, OBJECT)
    return value


def optional(owner: Json, name: str, kind: Kind, where: str = "") -> Any:
    """The field's value; None where it is null or not there. `where`: what `owner` is called."""
    value = owner.get(name)
    wanted, _ = kind
    # bool is an int to Python, not to JSON.
    if value is None or (
        isinstance(value, wanted) and (not isinstance(value, bool) or wanted is bool)
    ):
        return value
    raise _wrong_type(path(where, name), kind)


def required(owner: Json, name: str, kind: Kind, where: str = "") -> Any:
    value = optional(owner, name, kind, where)
    if value is None:
        raise missing(path(where, name))
    return value


def one_of(owner: Json, name: str, allowed: tuple[str, ...], where: str = "") -> Any:
    """The field's value, which is one of `allowed`; None where it is null or not there."""
    value = owner.get(name)
    if value is None or value in allowed:
        return value
    whole = path(where, name)
    named = f"{value!r}" if isinstance(value, str) else "this"
    raise refusal(
        f"Invalid value for '{whole}': {named}. Served are: {', '.join(map(repr, allowed))}.", whole
    )


def missing(whole: str) -> BadRequest:
    return refusal(
        f"Missing required parameter: '{whole}'.", whole, code="missing_required_parameter"
    )


def path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _wrong_type(whole: str, kind: Kind) -> BadRequest:
    return refusal(f"Invalid type for '{whole}': it is not {kind[1]}.", whole, code="invalid_type")
