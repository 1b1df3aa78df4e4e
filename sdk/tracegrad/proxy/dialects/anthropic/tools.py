"""Tools of an Anthropic Messages request, and which of them the model is to use.

Only tools with a schema of their own can be put before another model: those that run on
Anthropic's servers have nobody to run them here, and those whose schema Anthropic defines by a
type's name are known to its models alone.

A tool with `defer_loading` is not among the canonical tools. Its definition is put where a
tool's result first refers to it (`tool_reference`), as the vendor does: the prompt's beginning
stays as it was, and the conversation can be continued token by token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from tracegrad.events import Json
from tracegrad.proxy.dialects.json_field import JsonField

# Types begin with one of these; a date follows.
_ON_THE_SERVER = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_", "advisor")


@dataclass(frozen=True, slots=True)
class AnthropicTools:
    """`visible`: canonical tools, in order. `by_name`: those, and the deferred ones."""

    visible: list[Json]
    by_name: Mapping[str, Json]

    def definition(self, reference: JsonField) -> str:
        """The text that a `tool_reference` block stands for."""
        name = reference.require("tool_name")
        tool = self.by_name.get(name.text())
        if tool is None:
            raise name.error(f"is {name.text()!r}, which is not among the tools")
        return orjson.dumps(tool).decode()


def read_tools(given: JsonField | None) -> AnthropicTools:
    shown: list[Json] = []
    by_name: dict[str, Json] = {}
    for tool in given.items() if given else ():
        function = _function(tool)
        canonical = {"type": "function", "function": function}
        if function["name"] in by_name:
            raise tool.require("name").error("is the name of another tool too")
        by_name[function["name"]] = canonical
        if not tool.is_set("defer_loading"):
            shown.append(canonical)
    return AnthropicTools(shown, by_name)


def read_choice(given: JsonField | None, tools: AnthropicTools) -> Json:
    """The canonical fields that `tool_choice` stands for."""
    if given is None:
        return {}
    kind = given.require("type").one_of(("auto", "any", "tool", "none"))
    if not tools.by_name:
        raise given.error("is set, but there are no tools")
    if not tools.visible:
        if kind in ("auto", "none"):
            return {}
        raise given.error("asks for a tool, but all of them have defer_loading")
    fields: Json = {"tool_choice": {"any": "required"}.get(kind, kind)}
    if kind == "tool":
        name = given.require("name")
        if name.text() not in (tool["function"]["name"] for tool in tools.visible):
            raise name.error("is not the name of one of the tools")
        fields["tool_choice"] = {"type": "function", "function": {"name": name.text()}}
    if given.is_set("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _function(tool: JsonField) -> Json:
    kind = tool.get("type")
    if kind is not None and kind.text() != "custom":
        _refuse(tool, kind.text())
    name = tool.require("name").some_text()
    if tool.items_of("input_examples"):
        problem = "is not served; put the examples in the description"
        raise tool.require("input_examples").error(problem)
    callers = tool.get("allowed_callers")
    if callers is not None and "direct" not in callers.texts():
        raise callers.error("has no 'direct': there is no code execution here to call the tool")
    function: Json = {"name": name}
    if (description := tool.get("description")) is not None:
        function["description"] = description.text()
    function["parameters"] = tool.require("input_schema").object()
    if tool.is_set("strict"):
        function["strict"] = True
    return function


def _refuse(tool: JsonField, kind: str) -> None:
    if kind.startswith(_ON_THE_SERVER):
        why = "runs on Anthropic's servers, and there is nothing here that does what it does"
    else:
        why = "has a schema that only Anthropic's models know; give it an input_schema of its own"
    raise tool.error(f"is of type {kind[:60]!r}, which is not served: it {why}")
