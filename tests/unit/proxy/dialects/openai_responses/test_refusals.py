"""Responses API: what cannot be served is refused with a 400 that names it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from support.proxy.openai_responses import DIALECT, PATCH, TOOL, ask
from tracegrad.proxy.http.errors import ApiError, BadRequest

Json = dict[str, Any]

PICTURE = "data:image/png;base64,AAAA"
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


def refused(**request: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        ask(**request)
    assert caught.value.status == 400
    return caught.value


REFUSALS: list[tuple[Json, str, str]] = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "missing_required_parameter"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": [5]}, "input[0]", "invalid_type"),
    ({"input": [{"role": "bot", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"type": "message"}]}, "input[0].role", "missing_required_parameter"),
    ({"input": [{"role": "user"}]}, "input[0].content", "invalid_type"),
    (
        {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "unsupported_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        {
            "input": [
                {"role": "assistant", "content": [{"type": "input_image", "image_url": PICTURE}]}
            ]
        },
        "input[0].content[0]",
        "invalid_value",
    ),
    ({"input": [{"id": "msg_1"}]}, "input[0]", "unsupported_value"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_value"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]", "unsupported_value"),
    ({"input": [{"type": "local_shell_call"}]}, "input[0]", "unsupported_value"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "invalid_type"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "missing_required_parameter"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
        "input[0].output",
        "invalid_type",
    ),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content", "invalid_type"),
    ({"tools": 5}, "tools", "invalid_type"),
    ({"tools": [5]}, "tools[0]", "invalid_type"),
    ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1]", "unsupported_value"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0]", "unsupported_value"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]", "unsupported_value"),
    ({"tools": [{"name": "x"}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    (
        {"tools": [{"type": "function", "function": {"name": "x"}}]},
        "tools[0].name",
        "missing_required_parameter",
    ),
    ({"tools": [{**TOOL, "parameters": "x"}]}, "tools[0].parameters", "invalid_type"),
    ({"tools": [{**TOOL, "strict": "x"}]}, "tools[0].strict", "invalid_type"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "unsupported_value"),
    ({"tools": [{**TOOL, "async": True}]}, "tools[0].async", "unsupported_value"),
    ({"tools": [{**PATCH, "format": {}}]}, "tools[0].format.type", "missing_required_parameter"),
    (
        {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "bnf"}}]},
        "tools[0].format.syntax",
        "invalid_value",
    ),
    (
        {"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers",
        "unsupported_value",
    ),
    ({"tools": [TOOL, TOOL]}, "tools[1]", "invalid_value"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0]",
        "unsupported_value",
    ),
    ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": 5}, "tool_choice", "invalid_type"),
    ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "tool_choice.type", "invalid_value"),
    (
        {"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]},
        "tool_choice.name",
        "invalid_value",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "tools": []}, "tools": [TOOL]},
        "tool_choice.mode",
        "missing_required_parameter",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]},
        "tool_choice.tools",
        "invalid_value",
    ),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"truncation": "left"}, "truncation", "invalid_value"),
    ({"moderation": {"model": "x"}}, "moderation", "unsupported_parameter"),
    (
        {"context_management": [{"type": "compaction"}]},
        "context_management",
        "unsupported_parameter",
    ),
    ({"messages": []}, "messages", "unknown_parameter"),
    ({"n": 2}, "n", "unknown_parameter"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "unknown_parameter"),
    ({"return_token_ids": True}, "return_token_ids", "unknown_parameter"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 1.5}, "max_output_tokens", "invalid_type"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"include": ["everything"]}, "include[0]", "invalid_value"),
    ({"include": [[]]}, "include[0]", "invalid_value"),
    ({"reasoning": {"effort": "hard"}}, "reasoning.effort", "invalid_value"),
    ({"reasoning": {"effort": []}}, "reasoning.effort", "invalid_value"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "invalid_value"),
    ({"text": {"format": "json"}}, "text.format", "invalid_type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format.schema",
        "missing_required_parameter",
    ),
]


@pytest.mark.parametrize(("request_", "param", "code"), REFUSALS)
def test_what_cannot_be_served_is_refused_by_name(request_: Json, param: str, code: str) -> None:
    error = refused(**request_)
    assert (error.param, error.code) == (param, code)
    assert param in error.message


def test_two_tools_of_one_name_in_two_namespaces_cannot_be_chosen_by_it() -> None:
    spaces = [
        {"type": "namespace", "name": name, "description": "", "tools": [TOOL]} for name in "ab"
    ]
    error = refused(tools=spaces, tool_choice={"type": "function", "name": "look"})
    assert "several namespaces" in error.message


def test_web_search_is_refused_with_the_mend_for_codex() -> None:
    assert 'web_search = "disabled"' in refused(tools=[{"type": "web_search"}]).message


def test_a_body_that_cannot_be_written_again_is_refused() -> None:
    deep = b'{"input": "hi", "metadata": null, "text": ' + b'{"a":' * 300 + b"1" + b"}" * 301
    with pytest.raises(BadRequest, match="too deep"):
        DIALECT.parse(deep, {}, {})


def test_errors_have_openais_shape_and_the_clients_names() -> None:
    raw = b'{"error": {"message": "vLLM says", "type": "BadRequestError", "code": 400}}'
    error = ApiError(400, "too long", kind="BadRequestError", param="messages", code="400", raw=raw)
    assert DIALECT.error(error) == (
        b'{"error":{"message":"too long","type":"invalid_request_error","param":"input",'
        b'"code":null}}'
    )
    busy = ApiError(503, "later", kind="service_unavailable", code="weights")
    assert b'"type":"server_error","param":null,"code":"weights"' in DIALECT.error(busy)
    slow = ApiError(429, "slower", kind="x", code="rate_limit_exceeded")
    assert b'"type":"rate_limit_error"' in DIALECT.error(slow)


@pytest.mark.parametrize("content", ["gAAAAB", "tg1.%%%", "tg1.gICA"])
def test_reasoning_that_cannot_be_read_is_refused(content: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": content}
    error = refused(input=[USER, item])
    assert error.code == "invalid_encrypted_content"
    assert error.param == "input[1].encrypted_content"


@pytest.mark.parametrize("reported", ["resp_1", "resp_" + "g" * 32, "0" * 32, ""])
def test_a_response_that_is_not_ours_is_not_found(reported: str) -> None:
    error = refused(previous_response_id=reported)
    assert error.code == "previous_response_not_found"
    assert error.param == "previous_response_id"


@pytest.mark.parametrize("name", ["messages", "max_tokens", "response_format"])
def test_an_unknown_parameter_is_named_as_the_client_wrote_it(name: str) -> None:
    """Though the engine has it too, under which name it stands for another of the client's."""
    written = orjson.loads(DIALECT.error(refused(**{"input": "x", name: None})))["error"]
    assert (written["param"], written["code"]) == (name, "unknown_parameter")
