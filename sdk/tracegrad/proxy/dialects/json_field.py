"""A request's fields, read with their types, each knowing where it stands in the body.

For dialects whose requests are deep. Null is the same as absent.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from tracegrad.events import Json
from tracegrad.proxy.http.errors import BadRequest

_TOO_LARGE = 2**63


@dataclass(slots=True, eq=False)
class JsonField:
    """One value of a request. Readers raise BadRequest that names it."""

    value: Any
    parent: Self | None = None
    key: str | int = ""  # a field's name, or an index

    @property
    def where(self) -> str:
        """`messages.0.content`: as Anthropic's API names fields."""
        above = self.parent.where if self.parent else ""
        return f"{above}.{self.key}" if above else str(self.key)

    def get(self, name: str) -> Self | None:
        """A field of this object; None where it is null or absent."""
        value = self.object().get(name)
        return None if value is None else type(self)(value, self, name)

    def is_set(self, name: str) -> bool:
        """Whether the field is true; null or absent is false."""
        field = self.get(name)
        return field is not None and field.flag()

    def items_of(self, name: str) -> list[Self]:
        """The list of that name; empty where it is null or absent."""
        field = self.get(name)
        return field.items() if field is not None else []

    def require(self, name: str) -> Self:
        field = self.get(name)
        if field is None:
            raise type(self)(None, self, name).error("is missing")
        return field

    def items(self) -> list[Self]:
        if not isinstance(self.value, list):
            raise self.error("is not a list")
        return [type(self)(value, self, index) for index, value in enumerate(self.value)]

    def object(self) -> Json:
        if not isinstance(self.value, dict):
            raise self.error("is not an object")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.error("is not a string")
        return self.value

    def some_text(self) -> str:
        if not self.text():
            raise self.error("is empty")
        return self.text()

    def stop_strings(self) -> list[str]:
        if "" in (texts := self.texts()):
            raise self.error("has an empty string in it")
        return texts

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error("is not true or false")
        return self.value

    def number(self) -> float:
        # bool is an int to Python, not to JSON.
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.error("is not a number")
        return self.value

    def integer(self, least: int | None = None) -> int:
        """A number without a fraction, also where JSON has it as 64.0."""
        value = self.number()
        if value != int(value):
            raise self.error("is not an integer")
        if not -_TOO_LARGE < value < _TOO_LARGE:
            raise self.error("is too large")
        if least is not None and value < least:
            raise self.error(f"is less than {least}")
        return int(value)

    def texts(self) -> list[str]:
        return [item.text() for item in self.items()]

    def one_of(self, names: Iterable[str]) -> str:
        value = self.text()
        if value not in names:
            raise self.error(f"is {_short(value)}; served are {', '.join(sorted(names))}")
        return value

    def error(self, words: str, *, code: str | None = None) -> BadRequest:
        return BadRequest(f"{self.where}: {words}", param=self.where, code=code)

    def refuse_all_but(
        self, served: Container[str], refused: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`refused`: fields of this object that are known and cannot be served, and why."""
        for spelled, value in self.object().items():
            name = self.plain(spelled)
            if value is None or name in served or (name in refused and _empty(value)):
                continue
            why = refused.get(name, "it is not known here; leave it out")
            raise type(self)(value, self, spelled).error(f"is not served: {why}")

    def plain(self, spelled: str) -> str:
        """The name of a field that a client may spell in other ways."""
        return spelled


def _empty(value: Any) -> bool:
    return value is False or value in ({}, [], "")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
