"""A value that fits a JSON schema, made of the words and numbers of a prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class Words:
    """What a prompt has to fill in; each number and quotation is used once, in order."""

    prompt: str
    quoted: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.quoted = re.findall(r"'([^']+)'", self.prompt)
        self._quotes = iter(self.quoted)
        self._numbers = iter(re.findall(r"-?\d+", self.prompt))

    def text(self, name: str) -> str:
        return next(self._quotes, f"a {name}")

    def number(self) -> int:
        return int(next(self._numbers, 7))


def filled(schema: Json, words: Words, name: str = "value", root: Json | None = None) -> Any:
    """Every property is filled, the optional ones too."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return filled(target, words, name, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for many in ("anyOf", "oneOf", "allOf"):
        if many in schema:
            return filled(_first(schema[many]), words, name, root)
    return _of_type(schema, words, name, root)


def _first(schemas: list[Json]) -> Json:
    return next((each for each in schemas if each.get("type") != "null"), schemas[0])


def _of_type(schema: Json, words: Words, name: str, root: Json) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind == "object":
        properties = schema.get("properties") or {}
        return {key: filled(value, words, key, root) for key, value in properties.items()}
    if kind == "array":
        return [filled(schema.get("items") or {}, words, name, root)]
    plain: Json = {"boolean": True, "null": None}
    if kind in plain:
        return plain[kind]
    return words.number() if kind in ("integer", "number") else words.text(name)
