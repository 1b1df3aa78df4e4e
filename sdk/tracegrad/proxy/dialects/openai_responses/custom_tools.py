"""Custom tools: their input is plain text, which an engine's function takes as JSON.

    text      *** Begin Patch\\n
    function  {"input": "*** Begin Patch\\n"}

The text is read from JSON that is still on its way, so that a client sees it as it is written.
"""

from __future__ import annotations

import re

import orjson

from tracegrad.events import Json

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


def parameters(grammar: tuple[str, str] | None) -> Json:
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


def as_arguments(text: str) -> str:
    return orjson.dumps({INPUT: text}).decode()


def as_text(arguments: str) -> str:
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
        self._held = ""  # what cannot be told yet
        self._told: list[str] = []
        self._in_text = False
        self._raw = False
        self._closed = False

    def feed(self, arguments: str) -> str:
        """What can be told of the input, now that these arguments have come too."""
        self._arguments.append(arguments)
        self._held += arguments
        if not self._in_text and not self._raw:
            self._look_for_text()
        if self._raw:
            told, self._held = self._held, ""
        elif self._in_text and not self._closed:
            told = self._read()
        else:
            told = ""
        self._told.append(told)
        return told

    def finish(self) -> str:
        """The rest of the input: there are no more arguments."""
        if not self._closed:
            return self._held if not self._in_text else _decoded(self._held)
        if _TAIL.fullmatch(self._held):
            return ""
        told = "".join(self._told)
        try:
            whole = orjson.loads("".join(self._arguments))[INPUT]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return self._held
        # Of two inputs in one object the later one counts; the first has been told already.
        return whole[len(told) :] if isinstance(whole, str) and whole.startswith(told) else ""

    def _look_for_text(self) -> None:
        if begun := _HEAD.match(self._held):
            self._in_text = True
            self._held = self._held[begun.end() :]
        else:
            signs = _SPACE.sub("", self._held)
            self._raw = signs == _HEAD_SIGNS or not _HEAD_SIGNS.startswith(signs)

    def _read(self) -> str:
        """As much of the JSON string as is here; from a bare quote on all is held."""
        told: list[str] = []
        at = 0
        while at < len(self._held):
            if self._held[at] == '"':
                self._closed = True
                break
            if _CUT_ESCAPE.match(self._held, at):
                break
            piece = _PIECE.match(self._held, at)
            assert piece is not None, "a quote is the only sign that is no piece"
            told.append(_plain(piece.group()))
            at = piece.end()
        self._held = self._held[at:]
        return "".join(told)


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
