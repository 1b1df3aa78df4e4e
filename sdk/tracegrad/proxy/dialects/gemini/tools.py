"""Tools of a Gemini request, and which of them the model is to use."""

from __future__ import annotations

from tracegrad.events import Json
from tracegrad.proxy.dialects.gemini.json_field import GeminiJsonField
from tracegrad.proxy.dialects.gemini.schema import json_schema

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
        declarations = tool.get("functionDeclarations")
        for declaration in declarations.items() if declarations else ():
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
    name = declaration.require("name")
    if not name.text():
        raise name.error("is empty")
    function: Json = {"name": name.text()}
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
