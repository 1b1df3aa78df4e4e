"""Anthropic's requests as canonical calls."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.anthropic.request import AnthropicDialect, count_answer, count_request
from tracegrad.proxy.http.errors import BadRequest

Json = dict[str, Any]

USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
LOOK_CANONICAL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


def parse(**fields: Any) -> Call:
    request = {"model": "m", "max_tokens": 9, "messages": [USER], **fields}
    return AnthropicDialect().parse(orjson.dumps(request), {}, {})


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    return caught.value


def history(*messages: Json, **fields: Any) -> list[Json]:
    return parse(messages=[*messages, USER], **fields).messages[:-1]


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def test_a_plain_request_is_a_chat_completion() -> None:
    call = parse(system="Be brief.", temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["x"])
    assert call.body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, USER],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["x"],
    }
    assert (call.dialect, call.stream, call.untrainable) == ("messages", False, None)
    assert call.request["system"] == "Be brief."
    assert parse(stream=True).stream


def test_fields_for_the_vendors_accounts_and_caches_have_no_effect() -> None:
    plain = parse().body
    call = parse(
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        inference_geo="us",
        speed="fast",
        betas=["context-1m"],
        system=[{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        container=None,
        mcp_servers=[],
    )
    assert call.body == plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1e30}, "max_tokens"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"temperature": "1"}, "temperature"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "assistant", "content": "{"}]}, "messages.1"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{**LOOK, "input_examples": [{}]}]}, "tools.0.input_examples"),
        ({"tools": [LOOK, LOOK]}, "tools.1.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "y"}}, "tool_choice.name"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: Json, named: str) -> None:
    error = refused(**fields)
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith(named)
    assert named in error.message


def test_server_tools_and_tools_of_the_vendors_schema_have_different_errors() -> None:
    search = refused(tools=[{"type": "web_search_20260318", "name": "web_search"}])
    bash = refused(tools=[{"type": "text_editor_20250728", "name": "edit"}])
    assert "runs on Anthropic's servers" in search.message
    assert "input_schema" in bash.message


def test_system_blocks_are_one_text_without_claude_codes_billing_line() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=5f3a;"
    blocks = [
        {"type": "text", "text": billing},
        {"type": "text", "text": "You are an agent."},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    system = {"role": "system", "content": "You are an agent.\nBe brief."}
    assert parse(system=blocks).messages[0] == system
    assert parse(system=f"{billing}\nYou are an agent.\nBe brief.").messages[0] == system
    assert parse(system=billing).messages == [USER]


def test_system_text_inside_the_conversation_stays_where_it_is() -> None:
    inside = {"role": "system", "content": [{"type": "text", "text": "It is late."}]}
    assert history(USER, inside) == [USER, {"role": "system", "content": "It is late."}]
    assert refused(messages=[USER, {**inside, "clear_at": "next_user_message"}]).param == (
        "messages.1.clear_at"
    )
    change = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    error = refused(messages=[USER, {"role": "system", "content": [change]}])
    assert (error.param, error.code) == (
        "messages.1.content.0",
        "mid_conversation_tool_changes_not_supported",
    )


def test_tool_results_come_before_what_the_user_says() -> None:
    blocks = user(
        {"type": "text", "text": "look again"},
        {"type": "tool_result", "tool_use_id": "c1", "content": "a", "is_error": True},
        {"type": "text", "text": "please"},
    )
    assert parse(messages=[blocks, USER]).messages == [
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
        # Messages of one role in a row are one turn.
        {"role": "user", "content": "look again\nplease\nhi"},
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("done", "done"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_a_tool_results_text(content: object, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    assert parse(messages=[user(result)]).messages == [
        {"role": "tool", "tool_call_id": "c1", "content": text}
    ]


def test_assistant_messages_in_a_row_are_one() -> None:
    assert history(
        assistant(
            {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
            {"type": "redacted_thinking", "data": "xx"},
            {"type": "text", "text": "I "},
        ),
        assistant(
            {"type": "thinking", "thinking": "Well.", "signature": "s"},
            {"type": "text", "text": "look"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": [1, "é"]}},
        ),
    ) == [
        {
            "role": "assistant",
            "content": "I look",
            "reasoning": "Hm. Well.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at":[1,"é"]}'},
                }
            ],
        }
    ]


def test_images_pass_through_and_make_the_turn_untrainable() -> None:
    png = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}
    web = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    call = parse(
        messages=[
            user(
                {"type": "tool_result", "tool_use_id": "c1", "content": [png]},
                {"type": "text", "text": "see"},
                web,
            )
        ]
    )
    assert call.untrainable == "media"
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    assert call.messages == [
        {"role": "tool", "tool_call_id": "c1", "content": [inline]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
            ],
        },
    ]
    file = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    assert refused(messages=[user(file)]).param == "messages.0.content.0.source"


@pytest.mark.parametrize(
    "message",
    [
        user({"type": "document", "source": {"type": "text", "data": "x"}}),
        user({"type": "tool_use", "id": "c", "name": "n", "input": {}}),
        user({"type": "search_result"}),
        assistant({"type": "tool_result", "tool_use_id": "c"}),
        assistant({"type": "server_tool_use", "id": "c", "name": "web_search", "input": {}}),
        assistant({"type": "image", "source": {}}),
    ],
)
def test_blocks_that_cannot_be_served_are_named(message: Json) -> None:
    error = refused(messages=[message, USER])
    assert error.param == "messages.0.content.0"
    assert message["content"][0]["type"] in error.message


def test_tools_and_the_choice_among_them() -> None:
    strict = {**LOOK, "name": "see", "type": "custom", "strict": True, "cache_control": None}
    call = parse(tools=[LOOK, strict], tool_choice={"type": "any"})
    see = {**LOOK_CANONICAL["function"], "name": "see", "strict": True}
    assert call.body["tools"] == [LOOK_CANONICAL, {"type": "function", "function": see}]
    assert call.body["tool_choice"] == "required"
    assert "parallel_tool_calls" not in call.body
    assert "tool_choice" not in parse(tools=[LOOK]).body

    one = parse(tools=[LOOK], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert (one.body["tool_choice"], one.body["parallel_tool_calls"]) == ("auto", False)
    named = parse(tools=[LOOK], tool_choice={"type": "tool", "name": "look"})
    assert named.body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert parse(tools=[LOOK], tool_choice={"type": "none"}).body["tool_choice"] == "none"


def test_a_deferred_tool_stands_where_it_is_referred_to() -> None:
    deferred = {**LOOK, "defer_loading": True}
    find = {"name": "find", "input_schema": {"type": "object"}}
    reference = {"type": "tool_reference", "tool_name": "look"}
    messages = [
        USER,
        assistant({"type": "tool_use", "id": "c1", "name": "find", "input": {}}),
        user({"type": "tool_result", "tool_use_id": "c1", "content": [reference]}),
    ]
    call = parse(tools=[find, deferred], messages=messages)
    assert [tool["function"]["name"] for tool in call.body["tools"]] == ["find"]
    assert orjson.loads(call.messages[-1]["content"]) == LOOK_CANONICAL
    unknown = refused(tools=[find], messages=messages)
    assert unknown.param == "messages.2.content.0.content.0.tool_name"
    assert "tools" not in parse(tools=[deferred], tool_choice={"type": "auto"}).body
    assert refused(tools=[deferred], tool_choice={"type": "any"}).param == "tool_choice"


@pytest.mark.parametrize(
    ("thinking", "effort", "shown"),
    [
        (None, None, True),
        ({"type": "enabled", "budget_tokens": 31999}, None, True),
        ({"type": "adaptive", "display": "omitted"}, None, True),
        ({"type": "disabled"}, "none", False),
    ],
)
def test_thoughts_are_shown_unless_thinking_is_disabled(
    thinking: Json | None, effort: str | None, shown: bool
) -> None:
    call = parse(thinking=thinking)
    assert call.body.get("reasoning_effort") == effort
    assert call.visible.reasoning is shown
    assert "thinking_token_budget" not in call.body


def test_output_config_is_effort_and_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    reported = {"type": "json_schema", "schema": schema}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = parse(output_config={"effort": "high", "format": reported}).body
    assert (body["reasoning_effort"], body["response_format"]) == ("high", wanted)
    assert parse(output_format=reported).body["response_format"] == wanted
    assert refused(output_config={"effort": "huge"}).param == "output_config.effort"


@pytest.mark.parametrize(
    ("input_", "arguments"),
    [
        ({}, "{}"),
        ({"INVALID_JSON": '{"a": '}, '{"a": '),
        ({"__unparsedToolInput": {"raw": "né😀", "len": 4}}, "né😀"),
        # Cut by Claude Code: what it kept is not what the model wrote.
        (
            {"__unparsedToolInput": {"raw": "né", "len": 4}},
            '{"__unparsedToolInput":{"raw":"né","len":4}}',
        ),
        ({"INVALID_JSON": 1}, '{"INVALID_JSON":1}'),
        # The vendor's own SDK makes these of what models stream.
        ([1], "[1]"),
        (None, "null"),
    ],
)
def test_arguments_come_back_as_the_model_wrote_them(input_: object, arguments: str) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": input_}
    [message] = history(assistant(call))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_body_that_nests_deeper_than_it_can_be_passed_on_is_refused() -> None:
    schema: Json = {}
    for _ in range(252):
        schema = {"not": schema}
    raw = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":['
    raw += b'{"name":"a","input_schema":' + str(schema).replace("'", '"').encode() + b"}]}"
    with pytest.raises(BadRequest, match="nests too deep"):
        AnthropicDialect().parse(raw, {}, {})


def test_tokens_are_counted_of_what_would_be_rendered() -> None:
    request = {"model": "m", "system": "s", "messages": [USER, assistant()], "tools": [LOOK]}
    call = count_request(orjson.dumps(request), {})
    assert call.body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": None},
        ],
        "tools": [LOOK_CANONICAL],
    }
    assert orjson.loads(count_answer(12)) == {"input_tokens": 12}
    with pytest.raises(BadRequest, match="model: is missing"):
        count_request(b'{"messages": []}', {})
