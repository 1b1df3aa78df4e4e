"""Tools of the Responses API as functions of an engine, and calls of them back again.

A function stays one. A custom tool is a function with one string. The
tools of a namespace are functions called `<namespace>__<name>`, as vLLM calls them too. Tools
that run on OpenAI's servers are refused.

The input of a custom tool is plain text, which an engine's function takes as JSON. The text is
read from JSON that is still arriving, so that a client sees it as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tracegrad.events import Json
from tracegrad.proxy.dialects.body_checks import BOOL, OBJECT, STRING
from tracegrad.proxy.dialects.openai_responses.field_checks import (
    LIST,
    an_object,
    one_of,
    optional,
    refusal,
    required,
)
from tracegrad.proxy.http.errors import BadRequest

_FIX = {
    "web_search": ' (Codex: web_search = "disabled" in config.toml)',
    "local_shell": "; a function that takes the command does the same",
    "shell": "; a function that takes the command does the same",
    "apply_patch": "; a custom tool does the same",
}


@dataclass(frozen=True, slots=True)
class ResponsesTool:
    """`name` and `namespace` are the client's, `function` is canonical."""

    name: str
    namespace: str | None
    custom: bool
    function: Json

    @property
    def flat_name(self) -> str:
        return flat_name(self.name, self.namespace)


def flat_name(name: str, namespace: str | None) -> str:
    """What the engine calls it."""
    return f"{namespace}__{name}" if namespace else name


def tools_of(request: Json) -> dict[str, ResponsesTool]:
    """All tools of a request by the engine's names, in order. Raises BadRequest.

    `additional_tools` are items of the input (Codex has them with OpenAI's newest models);
    an engine's prompt has one place for tools, so they are among the others there.
    """
    tools: dict[str, ResponsesTool] = {}
    for tool, where in _all(request):
        if tool.flat_name in tools:
            raise refusal(f"'{where}': there is a tool called '{tool.flat_name}' before it.", where)
        tools[tool.flat_name] = tool
    return tools


def canonical(tool: ResponsesTool) -> Json:
    return {"type": "function", "function": tool.function}


def choose(request: Json, tools: Mapping[str, ResponsesTool]) -> tuple[list[Json], Any]:
    """The canonical `tools` and `tool_choice`; the choice is None where none is to be sent.

    Raises BadRequest.
    """
    choice = request.get("tool_choice")
    shown = [canonical(tool) for tool in tools.values()]
    if choice is None or isinstance(choice, str):
        one_of(request, "tool_choice", ("auto", "none", "required"))
        if choice == "required" and not tools:
            raise refusal("'tool_choice' is 'required' but there are no tools.", "tool_choice")
        return shown, choice if tools else None
    choice = an_object(choice, "tool_choice")
    required(choice, "type", STRING, "tool_choice")
    kind = one_of(choice, "type", ("function", "custom", "allowed_tools"), "tool_choice")
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    tool = _find(choice, tools, _by_own_name(tools), "tool_choice")
    return shown, {"type": "function", "function": {"name": tool.flat_name}}


def _allowed(choice: Json, tools: Mapping[str, ResponsesTool]) -> tuple[list[Json], str]:
    """The engine is shown only what it may call: it has no other way to forbid the rest."""
    required(choice, "mode", STRING, "tool_choice")
    mode: str = one_of(choice, "mode", ("auto", "required"), "tool_choice")
    listed = required(choice, "tools", LIST, "tool_choice")
    names = set()
    own_names = _by_own_name(tools)
    for index, entry in enumerate(listed):
        where = f"tool_choice.tools[{index}]"
        names.add(_find(an_object(entry, where), tools, own_names, where).flat_name)
    if not names:
        raise refusal("'tool_choice.tools' is empty.", "tool_choice.tools")
    shown = [canonical(tool) for name, tool in tools.items() if name in names]
    return shown, mode


def _by_own_name(tools: Mapping[str, ResponsesTool]) -> Mapping[str, list[ResponsesTool]]:
    found: dict[str, list[ResponsesTool]] = {}
    for tool in tools.values():
        found.setdefault(tool.name, []).append(tool)
    return found


def _find(
    named: Json,
    tools: Mapping[str, ResponsesTool],
    own_names: Mapping[str, list[ResponsesTool]],
    where: str,
) -> ResponsesTool:
    """The tool that a choice means: by the engine's name, or by its own where that is enough."""
    name = required(named, "name", STRING, where)
    if name in tools:
        return tools[name]
    found = own_names.get(name, [])
    if len(found) == 1:
        return found[0]
    problem = "is in several namespaces; name it <namespace>__<name>" if found else "is no tool"
    raise refusal(f"'{where}.name': '{name}' {problem} of this request.", f"{where}.name")


def _all(request: Json) -> Iterator[tuple[ResponsesTool, str]]:
    yield from _listed(request, "")
    items = request.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            yield from _listed(item, f"input[{index}]")


def _listed(owner: Json, where: str) -> Iterator[tuple[ResponsesTool, str]]:
    listed = optional(owner, "tools", LIST, where) or []
    for index, entry in enumerate(listed):
        name = f"{where}.tools[{index}]" if where else f"tools[{index}]"
        tool = an_object(entry, name)
        if tool.get("type") == "namespace":
            yield from _namespace(tool, name)
        else:
            yield _tool(tool, name, None), name


def _namespace(space: Json, where: str) -> Iterator[tuple[ResponsesTool, str]]:
    namespace = required(space, "name", STRING, where)
    # Said once: with its first tool.
    about = optional(space, "description", STRING, where)
    for index, entry in enumerate(required(space, "tools", LIST, where)):
        name = f"{where}.tools[{index}]"
        yield _tool(an_object(entry, name), name, namespace, about), name
        about = None


def _tool(tool: Json, where: str, namespace: str | None, about: str | None = None) -> ResponsesTool:
    kind = required(tool, "type", STRING, where)
    if kind not in ("function", "custom"):
        raise _not_served(kind, where)
    _check_how_it_runs(tool, where)
    if kind == "function" and "function" in tool and "name" not in tool:
        raise refusal(
            f"Missing required parameter: '{where}.name'. Here a tool's name, description and "
            "parameters are beside 'type', not inside 'function' as in chat completions.",
            f"{where}.name",
            code="missing_required_parameter",
        )
    name = required(tool, "name", STRING, where)
    function: Json = {"name": flat_name(name, namespace)}
    description = optional(tool, "description", STRING, where)
    if about or description:
        function["description"] = "\n\n".join(text for text in (about, description) if text)
    if kind == "custom":
        function["parameters"] = custom_tool_parameters(_grammar(tool, where))
    else:
        schema = optional(tool, "parameters", OBJECT, where)
        function["parameters"] = schema or {"type": "object", "properties": {}}
        if optional(tool, "strict", BOOL, where):
            function["strict"] = True
    return ResponsesTool(name, namespace, kind == "custom", function)


def _grammar(tool: Json, where: str) -> tuple[str, str] | None:
    """A custom tool's grammar: its syntax and its text. None where any text will do."""
    where_format = f"{where}.format"
    form = optional(tool, "format", OBJECT, where)
    if form is None or one_of(form, "type", ("text", "grammar"), where_format) == "text":
        return None
    required(form, "type", STRING, where_format)
    required(form, "syntax", STRING, where_format)
    syntax: str = one_of(form, "syntax", ("lark", "regex"), where_format)
    return syntax, required(form, "definition", STRING, where_format)


def _check_how_it_runs(tool: Json, where: str) -> None:
    for name in ("defer_loading", "async"):
        if optional(tool, name, BOOL, where):
            raise refusal(
                f"'{where}.{name}' is not served; leave it out.",
                f"{where}.{name}",
                code="unsupported_value",
            )
    callers = optional(tool, "allowed_callers", LIST, where)
    if callers is not None and "direct" not in callers:
        raise refusal(
            f"'{where}.allowed_callers': only tools that the model calls itself ('direct') "
            "are served.",
            f"{where}.allowed_callers",
            code="unsupported_value",
        )


def _not_served(kind: str, where: str) -> BadRequest:
    return refusal(
        f"'{where}': tools of type '{kind}' are not served, only 'function', 'custom' and "
        f"'namespace' are. Take it out of the request{_FIX.get(kind, '')}.",
        where,
        code="unsupported_value",
    )


INPUT = "input"

# Where the text begins, with the white space that a model may put there.
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')

_HEAD_SIGNS = '{"input":"'

_SPACE = re.compile(r"\s+")

# One piece of a JSON string: plain text, an escape (two of them for one character beyond the
# basic plane), or a backslash that begins none.
_PIECE = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
    r"|\\"
)

# An escape that the next characters may complete or lengthen.
_CUT_ESCAPE = re.compile(
    r"\\(u([0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?)?)?\Z"
)

# How a call ends after the text; the brace may have been cut off.
_TAIL = re.compile(r'"\s*(\}\s*)?')

_REPLACEMENT = "�"


def custom_tool_parameters(grammar: tuple[str, str] | None) -> Json:
    """The JSON schema of the function that stands for a custom tool.

    An engine cannot be held to a grammar inside a call's arguments; the model is shown it.
    """
    described = "The tool's input, as plain text."
    if grammar is not None:
        syntax, definition = grammar
        described = f"The tool's input, as plain text of this {syntax} grammar:\n{definition}"
    text = {"type": "string", "description": described}
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


def custom_input_as_arguments(text: str) -> str:
    return orjson.dumps({INPUT: text}).decode()


def custom_input_as_text(arguments: str) -> str:
    """The input in a call's whole arguments."""
    reader = CustomInputReader()
    return reader.feed(arguments) + reader.finish()


class CustomInputReader:
    """The input in a call's arguments, piece by piece.

    Nothing that the model wrote is lost: arguments that do not begin as they should are the
    input as they stand, and what follows a quote too many belongs to it.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._held = ""  # what cannot be sent yet
        self._emitted: list[str] = []
        self._in_text = False
        self._raw = False
        self._closed = False

    def feed(self, arguments: str) -> str:
        """What can be sent of the input, now that these arguments have come too."""
        self._arguments.append(arguments)
        self._held += arguments
        if not self._in_text and not self._raw:
            self._look_for_text()
        if self._raw:
            text, self._held = self._held, ""
        elif self._in_text and not self._closed:
            text = self._read()
        else:
            text = ""
        self._emitted.append(text)
        return text

    def finish(self) -> str:
        """The rest of the input: there are no more arguments."""
        if not self._closed:
            return self._held if not self._in_text else _decoded(self._held)
        if _TAIL.fullmatch(self._held):
            return ""
        text = "".join(self._emitted)
        try:
            whole = orjson.loads("".join(self._arguments))[INPUT]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return self._held
        # Of two inputs in one object the later one counts; the first has been sent already.
        return whole[len(text) :] if isinstance(whole, str) and whole.startswith(text) else ""

    def _look_for_text(self) -> None:
        if begun := _HEAD.match(self._held):
            self._in_text = True
            self._held = self._held[begun.end() :]
        else:
            signs = _SPACE.sub("", self._held)
            self._raw = signs == _HEAD_SIGNS or not _HEAD_SIGNS.startswith(signs)

    def _read(self) -> str:
        """As much of the JSON string as is here; from a bare quote on all is held."""
        texts: list[str] = []
        at = 0
        while at < len(self._held):
            if self._held[at] == '"':
                self._closed = True
                break
            if _CUT_ESCAPE.match(self._held, at):
                break
            piece = _PIECE.match(self._held, at)
            assert piece is not None, "a quote is the only sign that is no piece"
            texts.append(_plain(piece.group()))
            at = piece.end()
        self._held = self._held[at:]
        return "".join(texts)


def _decoded(text: str) -> str:
    return "".join(_plain(piece.group()) for piece in _PIECE.finditer(text))


def _plain(piece: str) -> str:
    """What a piece of a JSON string stands for."""
    if piece[0] != "\\" or piece == "\\":
        return piece
    try:
        text: str = orjson.loads(f'"{piece}"')
    except orjson.JSONDecodeError:
        return _REPLACEMENT  # half of a character
    return text
