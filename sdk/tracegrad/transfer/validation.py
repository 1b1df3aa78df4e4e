"""Objects that somebody else wrote: as a schema has them, or refused with the field and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

# How msgspec says where, after its words, which may quote what was given: $.turns[0].tags[...];
# [...] is some value of a dictionary.
_AT = " - at `$"
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = "Object contains unknown field"
_MISSING = re.compile("Object missing required field `(.*?)`")

# What to write for types without a description of their own.
_FIXES: dict[type[inspect.Type], str] = {
    inspect.StrType: "a text",
    inspect.BoolType: "true or false",
    inspect.ListType: "a list",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
}


class InvalidObject(ValueError):
    """`field` is where it is; the message says what is wrong with it and what to write."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def validate(value: object, schema: type[T]) -> T:
    """Raises InvalidObject."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise _explained(str(error), value, _type_info(schema)) from None
    except UnicodeEncodeError as error:  # msgspec reads names, choices and base64 as UTF-8
        problem = f"{error.object!a} holds half a surrogate pair; write whole characters"
        raise InvalidObject("object", problem) from None


_type_info: Callable[[type], inspect.Type] = cache(inspect.type_info)


def _explained(message: str, value: Any, expected: inspect.Type) -> InvalidObject:
    """msgspec's error about some part of `value`, with the fix; `expected`: the whole's type."""
    if message.startswith(_UNKNOWN) and (field := _unknown_field(value, expected)):
        return InvalidObject(field.removeprefix("."), "this format has no such field; leave it out")
    steps = _STEP.findall(message.rpartition(_AT)[2] if _AT in message else "")
    if missing := _MISSING.match(message):
        steps.append((missing[1], ""))
    place = ""
    for name, index in steps:
        whole = without_null(expected)
        if isinstance(whole, inspect.StructType):
            expected = next(field.type for field in whole.fields if field.name == name)
            value = value.get(name)
        elif isinstance(whole, inspect.DictType):  # of texts
            name = next(key for key, item in value.items() if not isinstance(item, str))
            value, expected = value[name], whole.value_type
        else:
            assert isinstance(whole, inspect.ListType | inspect.TupleType)
            value, at = value[int(index)], int(index)
            expected = whole.item_type if hasattr(whole, "item_type") else whole.item_types[at]
        place += f".{name}" if name else f"[{index}]"
    problem = f"{_problem(value, without_null(expected))}; write {_fix(expected)}"
    return InvalidObject(place.removeprefix(".") or "object", problem)


def _unknown_field(value: Any, expected: inspect.Type) -> str | None:
    """The first one's place. msgspec quotes its name, which may look like a place of its own."""
    whole = without_null(expected)
    found: Iterable[tuple[str, Any, inspect.Type]] = ()
    if isinstance(whole, inspect.StructType) and isinstance(value, dict):
        known = {field.name: field.type for field in whole.fields}
        if whole.forbid_unknown_fields:
            for name in value:
                if name not in known:
                    return f".{name}"
        found = ((f".{name}", value[name], known[name]) for name in value.keys() & known)
    elif (
        isinstance(whole, inspect.ListType)
        and isinstance(without_null(whole.item_type), inspect.StructType)
        and isinstance(value, list)
    ):
        found = ((f"[{at}]", item, whole.item_type) for at, item in enumerate(value))
    for place, item, its_type in found:
        if inner := _unknown_field(item, its_type):
            return place + inner
    return None


def without_null(expected: inspect.Type) -> inspect.Type:
    """The type itself, without its description and what else may stand there."""
    if isinstance(expected, inspect.Metadata):
        return without_null(expected.type)
    if isinstance(expected, inspect.UnionType):
        return without_null(expected.types[0])
    return expected


def _problem(value: Any, expected: inspect.Type) -> str:
    match expected, value:
        case _, None:
            return "it is missing or null"
        case _, bool():
            return f"{value}"
        case (inspect.IntType() | inspect.FloatType(), int() | float()):
            return f"{value}"
        case _, int() | float():
            return f"{value} is a number"
        case _, "":
            return "it is empty"
        case (inspect.EnumType() | inspect.LiteralType(), str()) | (inspect.TupleType(), list()):
            return f"{value!r}"
        case inspect.BytesType(), str():
            return "it is no base64"
        case _, str():
            return "it is a text"
        case _, list():
            return "it is a list"
        case _, dict():
            return "it is an object"
    return f"it is {type(value).__name__}"


def _fix(expected: inspect.Type) -> str:
    match expected:
        case inspect.Metadata():
            return str((expected.extra_json_schema or {})["description"])
        case inspect.UnionType(types=(inspect.StrType(), *_)):
            return "a text or null"
        case inspect.UnionType():
            return _fix(expected.types[0])
        case inspect.EnumType():
            return f"one of {', '.join(expected.cls)}"
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, expected.values))}"
    return _FIXES[type(expected)]


def without_nulls(value: Any) -> Any:
    """In a file with columns, fields that other rows have are not this one's."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
