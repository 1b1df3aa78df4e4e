"""Tools of a Gemini request, and which of them the model is to use.

Gemini's `Schema` is OpenAPI 3.0 with types in upper case; it becomes JSON schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracegrad.events import Json
from tracegrad.proxy.dialects.gemini.json_field import GeminiJsonField, camel

_ON_THE_SERVER = (
    "codeExecution",
    "computerUse",
    "enterpriseWebSearch",
    "exaAiSearch",
    "fileSearch",
    "googleMaps",
    "googleSearch",
    "googleSearchRetrieval",
    "mcpServers",
    "parallelAiSearch",
    "retrieval",
    "urlContext",
)

_DECLARATION = (
    "name",
    "description",
    "parameters",
    "parametersJsonSchema",
    "behavior",
    # What comes back from the function: chat templates have no place for it.
    "response",
    "responseJsonSchema",
)


def read_tools(given: GeminiJsonField | None) -> list[Json]:
    tools: list[Json] = []
    for tool in given.items() if given else ():
        _refuse_server_tools(tool)
        tool.refuse_all_but(("functionDeclarations",))
        for declaration in tool.items_of("functionDeclarations"):
            tools.append({"type": "function", "function": _function(declaration)})
    return tools


def read_choice(given: GeminiJsonField | None, tools: list[Json]) -> Json:
    """The canonical fields that `toolConfig` stands for; `tools` too, where it leaves some out."""
    config = given.get("functionCallingConfig") if given else None
    if given is not None:
        given.refuse_all_but(
            ("functionCallingConfig",),
            {
                "includeServerSideToolInvocations": "there are no server-side tools here",
                "retrievalConfig": "there is no retrieval here",
            },
        )
    if config is None:
        return {}
    config.refuse_all_but(
        ("mode", "allowedFunctionNames"),
        {"streamFunctionCallArguments": "calls are sent whole"},
    )
    if (mode := config.get("mode")) is None:
        return {}
    kind = mode.one_of(("AUTO", "ANY", "NONE", "MODE_UNSPECIFIED"))
    allowed = config.get("allowedFunctionNames")
    names = allowed.texts() if allowed else []
    if allowed is not None and names and kind != "ANY":
        raise allowed.error("is set, but mode is not ANY")
    if kind == "MODE_UNSPECIFIED" or (not tools and kind != "ANY"):
        return {}
    if not tools:
        raise mode.error("is ANY, but there are no functions")
    if allowed is None or not names:
        return {"tool_choice": {"ANY": "required"}.get(kind, kind.lower())}
    return _one_of_these(allowed, set(names), tools)


def _one_of_these(allowed: GeminiJsonField, names: set[str], tools: list[Json]) -> Json:
    shown = [tool for tool in tools if tool["function"]["name"] in names]
    if len(shown) != len(names):
        raise allowed.error("names a function that is not declared")
    if len(shown) == 1:
        return {"tool_choice": {"type": "function", "function": {"name": names.pop()}}}
    # An engine has no other way to forbid the rest.
    return {"tools": shown, "tool_choice": "required"}


def _function(declaration: GeminiJsonField) -> Json:
    declaration.refuse_all_but(_DECLARATION)
    if (behavior := declaration.get("behavior")) is not None:
        behavior.one_of(("BLOCKING", "UNSPECIFIED"))
    function: Json = {"name": declaration.require("name").some_text()}
    if (description := declaration.get("description")) is not None:
        function["description"] = description.text()
    schema = declaration.get("parameters")
    plain = declaration.get("parametersJsonSchema")
    if schema is not None and plain is not None:
        raise plain.error("is set, and parameters too; leave one of them out")
    if schema is not None:
        function["parameters"] = json_schema(schema)
    elif plain is not None:
        function["parameters"] = plain.object()
    return function


def _refuse_server_tools(tool: GeminiJsonField) -> None:
    """Also where they are empty: `{}` is how one is asked for."""
    for name in _ON_THE_SERVER:
        if (field := tool.get(name)) is not None:
            raise field.error(
                "is not served: it runs on Google's servers, and there is nothing here that does "
                "what it does"
            )


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
