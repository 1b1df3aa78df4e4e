"""What is rendered here is what vLLM renders: its own request model, reading and renderer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from support.chat.chat_templates import chat_template
from support.chat.conversations import CALL, CELLS, FOUND, SYSTEM, TOOLS, says, user
from support.chat.message_contents import CONTENTS
from support.chat.real_templates import FAMILIES, NOW, VARIABLES, model
from tracegrad.chat.messages import (
    developers_as_system,
    engine_message,
    engine_tools,
    render_options,
)
from tracegrad.chat.renderer import Renderer
from tracegrad.chat.template import ChatTemplate, RenderError

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

# What reading text needs of vLLM's model configuration.
CONFIG: Any = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)

ODD_MESSAGES: list[Json] = [
    {"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe careful."},
    {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header"}, "B"]},
    {"role": "developer", "content": "Be brief.", "tools": None},
    user("plain"),
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "c"]},
    {"role": "user", "content": [], "name": "ann"},
    {"role": "assistant", "content": None, "reasoning_content": "old name"},
    {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": []},
    {"role": "assistant", "content": "both", "reasoning": "new", "reasoning_content": "old"},
    {"role": "assistant", "content": "", "tool_calls": [CALL | {"index": 0}], "thinking": "t"},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": ""}, "b"]},
    {"role": "tool", "tool_call_id": "c", "name": "stock", "content": "17"},
]
for spelled in ("", "[]", '{"a": 1', '{"b": 1.0, "a": NaN}', "null", "3"):
    function = {"name": "f", "arguments": spelled}
    ODD_MESSAGES.append(says(calls=[{"id": "q", "type": "function", "function": function}]))


@pytest.fixture(scope="module")
def vllm() -> Any:
    """Its modules; importing them takes seconds, and they are not always there."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import chat_utils, hf

    def read(body: Json) -> Any:
        # vLLM changes what it is given.
        return ChatCompletionRequest(**json.loads(json.dumps({"model": "m", **body})))

    return SimpleNamespace(
        read=read, hf=hf, parse=chat_utils.parse_chat_messages, Tokenizer=PreTrainedTokenizerFast
    )


@pytest.mark.parametrize("parts", [False, True])
def test_messages_are_read_as_vllm_reads_them(vllm: Any, parts: bool) -> None:
    request = vllm.read({"messages": ODD_MESSAGES})
    read, _, _ = vllm.parse(request.messages, CONFIG, "openai" if parts else "string")
    ours = [engine_message(message, parts=parts) for message in ODD_MESSAGES]
    assert repr(ours) == repr([dict(message) for message in read])


@pytest.mark.parametrize(
    "messages",
    [
        ODD_MESSAGES,
        [SYSTEM, user("hi")],
        [{"role": "developer", "content": "d"}, user("hi")],
        [SYSTEM, {"role": "developer", "content": "d", "tools": TOOLS}, user("hi")],
        [user("hi"), {"role": "developer", "content": ""}],
    ],
)
@pytest.mark.parametrize("parts", [False, True])
def test_developers_become_the_system_as_in_vllm(
    vllm: Any, messages: list[Json], parts: bool
) -> None:
    shown = [engine_message(message, parts=parts) for message in messages]
    expected: Any = shown
    if any(message["role"] == "developer" for message in messages):
        renamed = vllm.hf._convert_developer_to_system(shown)
        expected = vllm.hf._consolidate_system_messages(renamed)
    assert developers_as_system(shown) == expected


def test_tools_are_read_as_vllm_reads_them(vllm: Any) -> None:
    bare: Json = {"function": {"name": "bare"}}
    full = {
        "type": "function",
        "defer_loading": True,
        "function": {"parameters": {"z": 1, "a": 2}, "strict": False, "extra": 1, "name": "full"},
    }
    inner = {"type": "function", "function": {"name": "inner", "defer_loading": False}}
    tools: list[Json] = [bare, full, inner, *TOOLS]
    request = vllm.read({"messages": [user("hi")], "tools": tools})
    assert repr(engine_tools(tools)) == repr([tool.model_dump() for tool in request.tools])


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"a": None, "b": "auto", "c": 0, "d": False}},
        {"chat_template_kwargs": {"style": "request"}, "documents": [{"title": "t", "text": "x"}]},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"add_generation_prompt": False},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "chat_template_kwargs": {"tools": [{"own": 1}]}},
    ],
)
@pytest.mark.parametrize("defaults", [None, {"style": "default", "enable_thinking": True}])
def test_template_arguments_are_those_of_vllm(
    vllm: Any, asked: Json, defaults: Json | None
) -> None:
    body = {"messages": [user("hi")], **asked}
    request = vllm.read(body)
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    given = {**(defaults or {}), "tokenize": False} | ({"tools": tools} if tools else {})
    theirs = request.build_chat_params("x", "auto").with_defaults(given).chat_template_kwargs
    ours = render_options(body, defaults)
    extra = {"tokenize": False, "continue_final_message": False}
    expected = {"add_generation_prompt": ours.add_generation_prompt, **(ours.kwargs or {})}
    if ours.tools is not None:
        expected["tools"] = ours.tools
    assert theirs == expected | extra


@pytest.mark.parametrize("name", FAMILIES)
def test_every_template_gets_what_vllm_hands_it(vllm: Any, name: str) -> None:
    family, text = FAMILIES[name], model(name)
    template = chat_template(family.template)
    theirs = vllm.Tokenizer(tokenizer_object=text.tokenizer._core, **VARIABLES)
    content_format = vllm.hf._detect_content_format(template, default="string")
    for cell in CELLS.values():
        messages = [*cell.before, cell.reply, *cell.new]
        body: Json = {"messages": messages, "chat_template_kwargs": family.kwargs}
        if cell.tools:
            body["tools"] = cell.tools
        request = vllm.read(body)
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        conversation, _, _ = vllm.parse(request.messages, CONFIG, content_format)
        params = request.build_chat_params(template, content_format)
        params = params.with_defaults({"tools": tools, "tokenize": False})
        arguments = {**params.get_apply_chat_template_kwargs(), "strftime_now": NOW.strftime}
        frame = render_options(body)
        renderer = Renderer(text, frame, NOW)
        shown = [renderer.message(message) for message in messages]
        try:
            expected = vllm.hf.safe_apply_chat_template(CONFIG, theirs, conversation, **arguments)
        except Exception:
            with pytest.raises(RenderError):
                renderer.render(shown)
        else:
            assert renderer.render(shown) == expected


@pytest.mark.parametrize("text", CONTENTS)
def test_loops_over_contents_are_found_as_by_vllm(vllm: Any, text: str) -> None:
    assert (vllm.hf._detect_content_format(text, default="string") == "openai") == CONTENTS[text]


def test_the_word_developer_is_looked_for_as_by_vllm(vllm: Any) -> None:
    for text in ("{{ 'developer' }}", '{{ "developer" }}', "developer", "{{ FOUND }}"):
        assert ChatTemplate(text).has_developer_role == vllm.hf._detect_developer_role_support(text)
    assert FOUND["role"] == "tool"
