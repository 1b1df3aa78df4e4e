"""Gemini's `Schema` (OpenAPI 3.0, types in upper case) as JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracegrad.events import Json
from tracegrad.proxy.dialects.gemini.json_field import GeminiJsonField, camel

_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
# Ways to say in a format what `enum` and `type` say; constrained decoding knows none of them.
_OWN_FORMATS = ("enum", "float", "double", "int32", "int64")


def json_schema(schema: GeminiJsonField) -> Json:
    """Keywords that both have stay as they are, in their order. Raises BadRequest."""
    out: Json = {}
    for key, value in schema.object().items():
        if value is not None:
            field = GeminiJsonField(value, schema, key)
            convert = _CONVERTED.get(camel(key))
            out.update(convert(field) if convert else {key: value})
    _order(schema, out)
    if out.pop("nullable", False):
        _allow_null(out)
    return out


def _type(field: GeminiJsonField) -> Json:
    if isinstance(field.value, list):
        return {"type": [_kind(kind) for kind in field.items()]}
    if field.value in ("TYPE_UNSPECIFIED", ""):
        return {}
    return {"type": _kind(field)}


def _kind(field: GeminiJsonField) -> str:
    kind = field.text().lower()
    if kind not in _TYPES:
        raise field.error("is not a type of JSON values")
    return kind


def _format(field: GeminiJsonField) -> Json:
    return {} if field.text() in _OWN_FORMATS else {"format": field.value}


def _count(name: str) -> Callable[[GeminiJsonField], Json]:
    """int64 in the protocol, which JSON writes as a string."""

    def convert(field: GeminiJsonField) -> Json:
        text = field.value
        if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 19:
            return {name: int(text)}
        return {name: field.integer(0)}

    return convert


def _one(name: str) -> Callable[[GeminiJsonField], Json]:
    def convert(field: GeminiJsonField) -> Json:
        return {name: field.value if isinstance(field.value, bool) else json_schema(field)}

    return convert


def _list(name: str) -> Callable[[GeminiJsonField], Json]:
    return lambda field: {name: [json_schema(item) for item in field.items()]}


def _named(name: str) -> Callable[[GeminiJsonField], Json]:
    def convert(field: GeminiJsonField) -> Json:
        schemas = field.object().items()
        return {
            name: {key: json_schema(GeminiJsonField(value, field, key)) for key, value in schemas}
        }

    return convert


def _same(name: str) -> Callable[[GeminiJsonField], Json]:
    return lambda field: {name: field.value}


_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_CONVERTED: dict[str, Callable[[GeminiJsonField], Json]] = {
    "type": _type,
    "format": _format,
    "properties": _named("properties"),
    "items": _one("items"),
    "anyOf": _list("anyOf"),
    "additionalProperties": _one("additionalProperties"),
    "defs": _named("$defs"),
    "ref": _same("$ref"),
    "nullable": lambda field: {"nullable": field.flag()},
    "propertyOrdering": lambda field: {},
    **{name: _count(name) for name in _COUNTS},
}


def _order(schema: GeminiJsonField, out: Json) -> None:
    """Properties as `propertyOrdering` has them: that is how a template writes them."""
    ordering = schema.get("propertyOrdering")
    properties: dict[str, Any] = out.get("properties") or {}
    if ordering is not None and properties:
        names = [name for name in ordering.texts() if name in properties]
        out["properties"] = {name: properties[name] for name in names} | properties


def _allow_null(schema: Json) -> None:
    kind: Any = schema.get("type")
    if isinstance(kind, str):
        schema["type"] = [kind, "null"]
    elif isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
