"""A Gemini request's fields as Google's APIs read JSON: names in camelCase or snake_case, and
one object where a list of them is meant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from tracegrad.proxy.dialects.json_field import JsonField


@dataclass(slots=True, eq=False)
class GeminiJsonField(JsonField):
    """Names are asked for in camelCase."""

    @property
    def where(self) -> str:
        """`contents[0].parts`: as Google's API names fields."""
        above = self.parent.where if self.parent else ""
        if isinstance(self.key, int):
            return f"{above}[{self.key}]"
        return f"{above}.{self.key}" if above else self.key

    def get(self, name: str) -> Self | None:
        fields = self.object()
        for spelled in (name, _snake(name)):
            if fields.get(spelled) is not None:
                return type(self)(fields[spelled], self, spelled)
        return None

    def items(self) -> list[Self]:
        if isinstance(self.value, dict):
            return [self]
        return JsonField.items(self)

    def plain(self, spelled: str) -> str:
        return camel(spelled)

    def named(self, name: str) -> bool:
        """Whether this is the field `name`."""
        return camel(str(self.key)) == name


@lru_cache(4096)  # names are the client's
def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def camel(name: str) -> str:
    """`any_of` -> `anyOf`; a name that is in camelCase stays."""
    first, *rest = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest) if first else name
