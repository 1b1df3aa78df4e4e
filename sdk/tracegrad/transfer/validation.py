"""Fields of an object that somebody else wrote: read by name, or refused by name."""

from __future__ import annotations

import math
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tracegrad.events import REWARD_RANGE, Json, is_reward, token_id_array

T = TypeVar("T")
_LARGEST_ID = 2**31 - 1
_LARGEST_INTEGER = 2**63 - 1


class InvalidObject(ValueError):
    """`field` is where it is, `fix` what is wrong with it and what to do."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class FieldReader:
    """The fields of one object. Each is asked for once; `done` refuses those that nobody did."""

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise InvalidObject(where or "object", f"{_kind(value)}; write an object")
        self._values: Json = value
        self._where = where
        self._asked: set[str] = set()

    def name(self, field: str) -> str:
        return f"{self._where}.{field}" if self._where else field

    def invalid(self, field: str, problem: str) -> InvalidObject:
        return InvalidObject(self.name(field), problem)

    def any(self, field: str) -> Any:
        """None where it is not there."""
        self._asked.add(field)
        return self._values.get(field)

    def rest(self) -> Json:
        """Those that were not asked for."""
        return {key: value for key, value in self._values.items() if key not in self._asked}

    def refuse_unread(self) -> None:
        if unknown := self.rest():
            raise self.invalid(min(unknown), "this format has no such field; leave it out")

    def text(self, field: str) -> str:
        value = self.any(field)
        if not isinstance(value, str) or not value:
            raise self.invalid(field, f"{_kind(value)}; write a text that is not empty")
        return value

    def text_or_none(self, field: str) -> str | None:
        value = self.any(field)
        if value is not None and not isinstance(value, str):
            raise self.invalid(field, f"{_kind(value)}; write a text or null")
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self.any(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(field, f"{_kind(value)}; write true or false")
        return value

    def number(self, field: str) -> float:
        value = self.number_or_none(field)
        if value is None:
            raise self.invalid(field, "it is missing; write a number")
        return value

    def number_or_none(self, field: str) -> float | None:
        value = self.any(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(field, f"{_kind(value)}; write a number")
        if not math.isfinite(value):
            raise self.invalid(field, f"{value}; write a finite number")
        return float(value)

    def reward(self, field: str) -> float:
        value = self.number(field)
        if not is_reward(value):
            raise self.invalid(field, f"{value:g} is no reward; write {REWARD_RANGE}")
        return value

    def integer(self, field: str) -> int:
        value = self.integer_or_none(field)
        if value is None:
            raise self.invalid(field, "it is missing; write a whole number")
        return value

    def integer_or_none(self, field: str) -> int | None:
        value = self.any(field)
        if value is None:
            return None
        if type(value) is not int or abs(value) > _LARGEST_INTEGER:
            raise self.invalid(field, f"{_kind(value)}; write a whole number of 64 bits")
        return value

    def object(self, field: str) -> Json:
        value = self.any(field)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.invalid(field, f"{_kind(value)}; write an object")
        return value

    def object_or_none(self, field: str) -> Json | None:
        return None if self.any(field) is None else self.object(field)

    def texts(self, field: str) -> dict[str, str]:
        found = self.object(field)
        for key, value in found.items():
            if not isinstance(value, str):
                raise self.invalid(f"{field}.{key}", f"{_kind(value)}; write a text")
        return found

    def items(self, field: str) -> list[Any]:
        value = self.any(field)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.invalid(field, f"{_kind(value)}; write a list")
        return value

    def objects(self, field: str) -> Iterator[FieldReader]:
        for index, value in enumerate(self.items(field)):
            yield FieldReader(value, f"{self.name(field)}[{index}]")

    def ids(self, field: str) -> array[int]:
        values = self.items(field)
        for index, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= _LARGEST_ID:
                raise self.invalid(
                    f"{field}[{index}]", f"{value!r}; write a token id, 0 to 2^31 - 1"
                )
        return token_id_array(values)

    def file_or_none(self, field: str) -> bytes | None:
        """Bytes, as base64."""
        value = self.text_or_none(field)
        try:
            return None if value is None else b64decode(value, validate=True)
        except ValueError:
            raise self.invalid(field, "it is no base64; write the file's bytes as base64") from None

    def logprobs(self, field: str) -> array[float]:
        values = self.items(field)
        for index, value in enumerate(values):
            if value is not None and type(value) not in (float, int):
                raise self.invalid(f"{field}[{index}]", f"{_kind(value)}; write a number or null")
        return array("f", [math.nan if value is None else value for value in values])

    def one_of(self, field: str, read: Callable[[str], T], choices: str) -> T:
        value = self.text(field)
        try:
            return read(value)
        except ValueError:
            raise self.invalid(field, f"{value!r}; write one of {choices}") from None


def without_nulls(value: Any) -> Any:
    """In a file with columns, fields that other rows have are not this one's."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _kind(value: object) -> str:
    match value:
        case None:
            return "it is missing or null"
        case bool() | int() | float():
            return f"{value} is a number" if not isinstance(value, bool) else f"{value}"
        case str():
            return "it is a text" if value else "it is empty"
        case list():
            return "it is a list"
        case dict():
            return "it is an object"
    return f"it is {type(value).__name__}"
