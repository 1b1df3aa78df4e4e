"""Templates are rendered as transformers renders them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from support.chat.conversations import CELLS, Cell, Json
from support.chat.message_contents import CONTENTS
from support.chat.real_templates import FAMILIES, NOW, VARIABLES, engine_text, model, template_form
from tracegrad.chat.template import ChatTemplate, RenderError

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_real_template_gives_what_transformers_gives(name: str) -> None:
    family, template = FAMILIES[name], model(name).template
    for cell in CELLS.values():
        messages = [*cell.before, cell.reply, *cell.new]
        shown = [template_form(message, family.parts) for message in messages]

        def ours(shown: list[Json] = shown, cell: Cell = cell) -> str:
            return template.render(shown, tools=cell.tools, kwargs=family.kwargs, now=NOW)

        def theirs(messages: list[Json] = messages, cell: Cell = cell) -> str:
            return engine_text(name, messages, cell.tools)

        assert _outcome(ours) == _outcome(theirs)


def _outcome(render: Callable[[], str]) -> str:
    """A text, or the one line of a refusal."""
    try:
        return render()
    except (RenderError, TemplateError, TypeError) as error:
        return "refused: " + " ".join(str(error).split())


@pytest.mark.parametrize("name", FAMILIES)
def test_whether_contents_are_parts_is_known(name: str) -> None:
    assert model(name).template.content_as_parts == FAMILIES[name].parts


ODD = [
    "{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}a{% break %}"
    "{% endfor %}",
    "{{ {'b': '<é>', 'a': [1, 2.5, none]} | tojson }}",
    "{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}",
    "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "  {% if true %}\n  x\n  {% endif %}\n",
    "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
    "{% macro day() %}{{ strftime_now('%Y') }}{% endmacro %}{{ day() }}{{ strftime_now('%d') }}",
    "{{ greeting is defined }}{{ greeting }}",
    "{% set greeting = greeting or 'none' %}{{ greeting }}",
]


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("kwargs", [{}, {"greeting": "hello", "unread": 1}])
def test_odd_features_are_those_of_transformers(text: str, kwargs: dict[str, Any]) -> None:
    (expected,), _ = render_jinja_template(
        [USER],
        chat_template=text,
        add_generation_prompt=True,
        **{**VARIABLES, "strftime_now": NOW.strftime, **kwargs},
    )
    assert ChatTemplate(text, VARIABLES).render(USER, kwargs=kwargs, now=NOW) == expected


def test_the_clock_is_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    assert (
        template.render(USER, now=datetime(1999, 12, 31, 23, 59, tzinfo=UTC)) == "1999-12-31 23:59"
    )
    assert template.render(USER, now=datetime(2000, 1, 1, tzinfo=UTC)) == "2000-01-01 00:00"


def test_arguments_that_are_not_for_the_template_do_not_reach_it() -> None:
    template = ChatTemplate("{{ padding is defined }} {{ tokenize is defined }}")
    assert template.render(USER, kwargs={"padding": 1, "tokenize": 1}, now=NOW) == "False False"


def test_special_tokens_can_be_overridden_by_arguments() -> None:
    template = ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(USER, now=NOW) == "<s>"
    assert template.render(USER, kwargs={"bos_token": ""}, now=NOW) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('no\nsystem role') }}", "no system role"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ y.z }}", "'y' is undefined"),
    ],
)
def test_a_refusal_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RenderError) as caught:
        ChatTemplate(text).render(USER, now=NOW)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(RenderError, match="at least one message"):
        ChatTemplate("x").render([], now=NOW)


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(RenderError, match="does not compile"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize("text", CONTENTS)
def test_a_loop_over_contents_means_parts(text: str) -> None:
    assert ChatTemplate(text).content_as_parts == CONTENTS[text]
