"""Tools of Gemini's requests, schemas, and what the vendor's own client sends."""

from __future__ import annotations

import httpx
import pytest
from google import genai
from google.genai import types
from pydantic import BaseModel

from support.proxy.gemini_requests import WHOLE, Json, parse, refused
from tracegrad.proxy.dialects.gemini.request import GeminiDialect

LOOK = {"name": "look", "parametersJsonSchema": {"type": "object"}}
SEE = {"name": "see", "description": "Sees."}
LOOK_CANONICAL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}
SEE_CANONICAL = {"type": "function", "function": {"name": "see", "description": "Sees."}}


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({}, {}),
        ({"mode": "AUTO"}, {"tool_choice": "auto"}),
        ({"mode": "NONE"}, {"tool_choice": "none"}),
        ({"mode": "ANY"}, {"tool_choice": "required"}),
        (
            {"mode": "ANY", "allowedFunctionNames": ["see"]},
            {"tool_choice": {"type": "function", "function": {"name": "see"}}},
        ),
        ({"mode": "ANY", "allowedFunctionNames": ["see", "look"]}, {"tool_choice": "required"}),
    ],
)
def test_tools_and_the_choice_among_them(choice: Json, fields: Json) -> None:
    tools = [{"functionDeclarations": [LOOK]}, {"functionDeclarations": [SEE]}]
    body = parse(tools=tools, toolConfig={"functionCallingConfig": choice}).body
    del body["messages"], body["model"]
    assert body == {"tools": [LOOK_CANONICAL, SEE_CANONICAL], **fields}


def test_where_some_functions_are_allowed_the_engine_is_shown_no_others() -> None:
    tools = [{"functionDeclarations": [LOOK, SEE, {"name": "hear"}]}]
    allowed = {"mode": "ANY", "allowedFunctionNames": ["look", "see"]}
    body = parse(tools=tools, toolConfig={"functionCallingConfig": allowed}).body
    assert body["tools"] == [LOOK_CANONICAL, SEE_CANONICAL]
    unknown = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["smell"]}}
    assert refused(tools=tools, toolConfig=unknown).param == (
        "toolConfig.functionCallingConfig.allowedFunctionNames"
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"behavior": "NON_BLOCKING"}, "behavior"),
        ({"parameters": {}, "parametersJsonSchema": {}}, "parametersJsonSchema"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_functions_that_cannot_be_served_are_named(fields: Json, named: str) -> None:
    tools = [{"functionDeclarations": [{"name": "f", **fields}]}]
    assert refused(tools=tools).param == f"tools[0].functionDeclarations[0].{named}"


def test_a_choice_that_cannot_be_served_is_named() -> None:
    choice = {"streamFunctionCallArguments": True}
    error = refused(toolConfig={"functionCallingConfig": choice})
    assert error.param == "toolConfig.functionCallingConfig.streamFunctionCallArguments"
    auto = {"mode": "AUTO", "allowedFunctionNames": ["look"]}
    error = refused(
        tools=[{"functionDeclarations": [LOOK]}], toolConfig={"functionCallingConfig": auto}
    )
    assert error.param == "toolConfig.functionCallingConfig.allowedFunctionNames"


def test_the_vendors_schema_becomes_json_schema() -> None:
    schema = {
        "type": "OBJECT",
        "propertyOrdering": ["b", "a"],
        "properties": {
            "a": {"type": "STRING", "nullable": True, "format": "enum", "enum": ["x"]},
            "b": {"type": "ARRAY", "minItems": "1", "items": {"type": "INTEGER"}},
            "type": {"any_of": [{"type": "NUMBER", "format": "float"}], "nullable": True},
            "c": {"type": "STRING", "format": "date-time", "nullable": False},
            "d": {"ref": "#/$defs/D"},
        },
        "required": ["a"],
        "additionalProperties": False,
        "defs": {"D": {"type": "TYPE_UNSPECIFIED", "description": "d"}},
    }
    tools = [{"functionDeclarations": [{"name": "f", "parameters": schema}]}]
    converted = parse(tools=tools).body["tools"][0]["function"]["parameters"]
    assert converted == {
        "type": "object",
        "properties": {
            "b": {"type": "array", "minItems": 1, "items": {"type": "integer"}},
            "a": {"type": ["string", "null"], "enum": ["x", None]},
            "type": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "c": {"type": "string", "format": "date-time"},
            "d": {"$ref": "#/$defs/D"},
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"D": {"description": "d"}},
    }
    assert list(converted["properties"])[:2] == ["b", "a"]
    wrong = {"type": "OBJECT", "properties": {"a": {"type": "DATE"}}}
    tools = [{"functionDeclarations": [{"name": "f", "parameters": wrong}]}]
    assert refused(tools=tools).param == (
        "tools[0].functionDeclarations[0].parameters.properties.a.type"
    )


class Weather(BaseModel):
    city: str
    degrees: float | None = None


def test_what_the_vendors_client_sends_is_served() -> None:
    sent: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"candidates": []})

    def look(at: str, times: int = 1) -> str:
        """Looks at something."""
        return at * times

    options = types.HttpOptions(httpx_client=httpx.Client(transport=httpx.MockTransport(handle)))
    client = genai.Client(api_key="k", http_options=options)
    client.models.generate_content(
        model="m",
        contents=[
            "see",
            types.Part.from_bytes(data=b"\xfb\xff", mime_type="image/png"),
            types.Content(
                role="model", parts=[types.Part.from_function_call(name="look", args={})]
            ),
            types.Content(
                role="user",
                parts=[types.Part.from_function_response(name="look", response={"output": "it"})],
            ),
        ],
        config=types.GenerateContentConfig(
            system_instruction="Be brief.",
            temperature=0.5,
            top_k=3,
            response_mime_type="application/json",
            response_schema=Weather,
            tools=[look],
            tool_config=types.ToolConfig(
                function_calling_config=types.FunctionCallingConfig(
                    mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["look"]
                )
            ),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            safety_settings=[
                types.SafetySetting(
                    category=types.HarmCategory.HARM_CATEGORY_HARASSMENT,
                    threshold=types.HarmBlockThreshold.BLOCK_NONE,
                )
            ],
            thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_budget=1024),
        ),
    )
    assert sent[0].url.path.endswith("/models/m:generateContent")
    call = GeminiDialect().parse(sent[0].content, WHOLE, {})
    assert [m["role"] for m in call.messages] == ["system", "user", "assistant", "tool"]
    url = call.messages[1]["content"][1]["image_url"]["url"]
    assert url == "data:image/png;base64,+/8="
    parameters = call.body["tools"][0]["function"]["parameters"]
    assert parameters["properties"]["times"]["type"] == "integer"
    schema = call.body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["city"] == {"title": "City", "type": "string"}
    assert (call.body["top_k"], call.untrainable) == (3, "media")
