"""A chat template, rendered as transformers renders it, without transformers.

The environment is that of `transformers.utils.chat_template_utils` (5.19): sandboxed and
immutable, blocks trimmed, loop controls, the `generation` block, a `tojson` that escapes no HTML,
`raise_exception` and `strftime_now`. One thing differs on purpose: the clock is the caller's, so
that a conversation begun yesterday is rendered again as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tracegrad.chat.content_format import iterates_content
from tracegrad.events import Json

# Arguments of `apply_chat_template` itself: they never reach a template.
_NOT_FOR_TEMPLATES = frozenset(
    (
        *("conversation", "chat_template", "continue_final_message", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    )
)
_ALWAYS_KNOWN = frozenset(("documents", "add_generation_prompt"))


class RenderError(Exception):
    """The template does not compile, or refuses the messages; one line."""


class ChatTemplate:
    """`special_tokens` are variables that a tokenizer brings (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises RenderError when `source` is no template."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._syntax = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateError as error:
            raise RenderError(f"the chat template does not compile: {_line(error)}") from error
        self._variables = frozenset(meta.find_undeclared_variables(self._syntax))

    @cached_property
    def content_as_parts(self) -> bool:
        """Whether the engine hands it contents as lists of parts, not as strings."""
        return iterates_content(self._syntax)

    @cached_property
    def has_developer_role(self) -> bool:
        """Whether it has a `developer` role; vLLM looks for the word, quoted."""
        return '"developer"' in self.source or "'developer'" in self.source

    def render(
        self,
        messages: Sequence[Json],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        now: datetime,
    ) -> str:
        """The prompt's text. `messages` are those of `messages.engine_message`; `kwargs` that
        the template does not read are dropped, as the engine drops them. Raises RenderError."""
        if not messages:
            raise RenderError("a conversation needs at least one message")
        read = self._variables | _ALWAYS_KNOWN
        given = {
            name: value
            for name, value in (kwargs or {}).items()
            if name in read and name not in _NOT_FOR_TEMPLATES
        }
        variables = {
            "documents": None,
            **self._special_tokens,
            **given,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
        }
        try:
            return self._template.render(variables)
        # A template may fail in any way that Python can.
        except Exception as error:
            raise RenderError(_line(error)) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _GenerationBlock(Extension):
    """`{% generation %}`: transformers marks what the model said with it; the text stays."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()
