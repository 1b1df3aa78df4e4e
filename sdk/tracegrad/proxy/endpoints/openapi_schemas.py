"""JSON schemas of what clients send, for the served OpenAPI document.

They hold what the dialects check by themselves; the engine judges the rest of chat and text
completions. An optional field may be null, which is the same as leaving it out.
"""

from __future__ import annotations

from typing import Any

from tracegrad.events import Json

STRING: Json = {"type": "string"}
NUMBER: Json = {"type": "number"}
INTEGER: Json = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
COUNT: Json = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
BOOL: Json = {"type": "boolean"}
ANY_OBJECT: Json = {"type": "object"}


def one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def const(value: str) -> Json:
    return {"type": "string", "const": value}


def array_of(items: Json, least: int = 0) -> Json:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def any_of(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def object_schema(needed: str = "", /, **fields: Json) -> Json:
    """An object; `needed` names the fields that it must have."""
    required = needed.split()
    schema: Json = {
        "type": "object",
        "properties": {
            name: field if name in required else any_of(field, {"type": "null"})
            for name, field in fields.items()
        },
    }
    return {**schema, "required": required} if required else schema


def closed_object(schema: Json) -> Json:
    """The object without any other fields."""
    return {**schema, "additionalProperties": False}


def _typed(kind: str, needed: str = "", /, **fields: Json) -> Json:
    return object_schema(f"type {needed}", type=const(kind), **fields)


_SAMPLING: dict[str, Json] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": NUMBER,
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
}

# Chat and text completions; unknown fields are the engine's to know.

_FUNCTION = object_schema(
    "name", name=STRING, description=STRING, parameters=ANY_OBJECT, strict=BOOL
)
_TOOL_CALL = object_schema(
    "function", id=STRING, type=STRING, function=object_schema("name", name=STRING)
)
_CHAT_MESSAGE = object_schema(
    "role",
    role=STRING,
    content=any_of(STRING, array_of(any_of(STRING, ANY_OBJECT))),
    tool_calls=array_of(_TOOL_CALL),
    tool_call_id=STRING,
    reasoning=STRING,
)
CHAT = object_schema(
    "messages",
    model=STRING,
    messages=array_of(_CHAT_MESSAGE, 1),
    stream=BOOL,
    stream_options=object_schema(include_usage=BOOL),
    n=COUNT,
    max_completion_tokens=COUNT,
    tools=array_of(_typed("function", "function", function=_FUNCTION)),
    tool_choice=any_of(one_of("none", "auto", "required"), ANY_OBJECT),
    parallel_tool_calls=BOOL,
    response_format=ANY_OBJECT,
    stop=any_of(STRING, array_of(STRING)),
    seed=INTEGER,
    logprobs=BOOL,
    return_token_ids=BOOL,
    include_reasoning=BOOL,
    **_SAMPLING,
)
_PROMPT = any_of(
    {"type": "string", "minLength": 1},
    array_of(INTEGER, 1),
    array_of(any_of(STRING, array_of(INTEGER)), 1),
)
COMPLETION = object_schema(
    "prompt",
    model=STRING,
    prompt=_PROMPT,
    stream=BOOL,
    stream_options=object_schema(include_usage=BOOL),
    n=COUNT,
    max_tokens=COUNT,
    echo=BOOL,
    stop=any_of(STRING, array_of(STRING)),
    seed=INTEGER,
    logprobs=INTEGER,
    return_token_ids=BOOL,
    **_SAMPLING,
)
EMBEDDING = object_schema(
    "input", model=STRING, input=any_of(STRING, array_of(any_of(STRING, INTEGER), 1))
)

# Responses

_INPUT_PART = any_of(
    _typed("input_text", "text", text=STRING),
    _typed("output_text", "text", text=STRING),
    _typed("refusal", "refusal", refusal=STRING),
    _typed("input_image", "image_url", image_url=STRING, detail=one_of("auto", "low", "high")),
    _typed("input_audio", "input_audio", input_audio=ANY_OBJECT),
)
_PARTS = any_of(STRING, array_of(_INPUT_PART))
_SUMMARY = object_schema("text", text=STRING)
_ITEM = any_of(
    object_schema(
        "role content",
        type=const("message"),
        role=one_of("user", "assistant", "system", "developer"),
        content=_PARTS,
    ),
    _typed(
        "function_call", "call_id name arguments", call_id=STRING, name=STRING, arguments=STRING
    ),
    _typed("function_call_output", "call_id output", call_id=STRING, output=_PARTS),
    _typed("custom_tool_call", "call_id name input", call_id=STRING, name=STRING, input=STRING),
    _typed("custom_tool_call_output", "call_id output", call_id=STRING, output=_PARTS),
    _typed("reasoning", summary=array_of(_SUMMARY), content=array_of(_SUMMARY)),
)
_RESPONSES_TOOL = any_of(
    _typed("function", "name", name=STRING, description=STRING, parameters=ANY_OBJECT, strict=BOOL),
    _typed("custom", "name", name=STRING, description=STRING),
)
_TEXT_FORMAT = any_of(
    _typed("text"),
    _typed("json_object"),
    _typed("json_schema", "name schema", name=STRING, schema=ANY_OBJECT, strict=BOOL),
)
RESPONSE = object_schema(
    model=STRING,
    input=any_of(STRING, array_of(_ITEM, 1)),
    instructions=STRING,
    previous_response_id=STRING,
    stream=BOOL,
    stream_options=ANY_OBJECT,
    max_output_tokens=COUNT,
    tools=array_of(_RESPONSES_TOOL),
    tool_choice=any_of(one_of("none", "auto", "required"), ANY_OBJECT),
    parallel_tool_calls=BOOL,
    reasoning=object_schema(
        effort=one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        summary=one_of("auto", "concise", "detailed"),
    ),
    text=object_schema(format=_TEXT_FORMAT, verbosity=one_of("low", "medium", "high")),
    include=array_of(one_of("message.output_text.logprobs", "reasoning.encrypted_content")),
    include_reasoning=BOOL,
    top_logprobs={"type": "integer", "minimum": 0, "maximum": 20},
    stop=any_of(STRING, array_of(STRING)),
    seed=INTEGER,
    metadata={"type": "object", "additionalProperties": STRING},
    store=BOOL,
    user=STRING,
    service_tier=STRING,
    prompt_cache_key=STRING,
    safety_identifier=STRING,
    **_SAMPLING,
)

# Anthropic's Messages

_TEXT_BLOCK = _typed("text", "text", text=STRING)
_SOURCE = any_of(
    _typed("base64", "media_type data", media_type=STRING, data=STRING),
    _typed("url", "url", url=STRING),
)
_IMAGE_BLOCK = _typed("image", "source", source=_SOURCE)
_RESULT_BLOCK = _typed(
    "tool_result",
    "tool_use_id",
    tool_use_id=STRING,
    content=any_of(STRING, array_of(any_of(_TEXT_BLOCK, _IMAGE_BLOCK))),
    is_error=BOOL,
)
_ASSISTANT_BLOCK = any_of(
    _TEXT_BLOCK,
    _typed("thinking", "thinking", thinking=STRING, signature=STRING),
    _typed("redacted_thinking", data=STRING),
    _typed("tool_use", "id name input", id=STRING, name=STRING, input=ANY_OBJECT),
)
_MESSAGE = any_of(
    object_schema(
        "role content",
        role=const("user"),
        content=any_of(STRING, array_of(any_of(_TEXT_BLOCK, _IMAGE_BLOCK, _RESULT_BLOCK))),
    ),
    object_schema(
        "role content",
        role=const("assistant"),
        content=any_of(STRING, array_of(_ASSISTANT_BLOCK)),
    ),
)
_CONVERSATION: dict[str, Json] = {
    "model": {"type": "string", "minLength": 1},
    "messages": array_of(_MESSAGE, 1),
    "system": any_of(STRING, array_of(_TEXT_BLOCK)),
    "tools": array_of(
        object_schema(
            "name input_schema",
            type=const("custom"),
            name={"type": "string", "minLength": 1},
            description=STRING,
            input_schema=ANY_OBJECT,
            strict=BOOL,
        )
    ),
    "tool_choice": any_of(
        object_schema("type", type=one_of("auto", "any", "none"), disable_parallel_tool_use=BOOL),
        _typed("tool", "name", name=STRING, disable_parallel_tool_use=BOOL),
    ),
    "thinking": any_of(
        object_schema("type", type=one_of("adaptive", "disabled")),
        _typed("enabled", "budget_tokens", budget_tokens={**COUNT, "minimum": 0}),
    ),
    "output_config": closed_object(
        object_schema(
            effort=one_of("low", "medium", "high", "xhigh", "max"),
            format=_typed("json_schema", "schema", schema=ANY_OBJECT),
        )
    ),
    "chat_template_kwargs": ANY_OBJECT,
}
MESSAGE = object_schema(
    "model messages max_tokens",
    max_tokens=COUNT,
    stream=BOOL,
    stop_sequences=array_of({"type": "string", "minLength": 1}),
    temperature=NUMBER,
    top_p=NUMBER,
    top_k=INTEGER,
    metadata=ANY_OBJECT,
    service_tier=STRING,
    **_CONVERSATION,
)
TOKEN_COUNT = object_schema("model messages", **_CONVERSATION)

# Gemini; fields may also be spelled with underscores.

_GEMINI_PART = any_of(
    object_schema("text", text=STRING, thought=BOOL),
    object_schema(
        "inlineData", inlineData=object_schema("mimeType data", mimeType=STRING, data=STRING)
    ),
    object_schema(
        "functionCall", functionCall=object_schema("name", id=STRING, name=STRING, args=ANY_OBJECT)
    ),
    object_schema(
        "functionResponse",
        functionResponse=object_schema("name", id=STRING, name=STRING, response=ANY_OBJECT),
    ),
)
_CONTENT = object_schema(
    "parts", role=one_of("user", "model", "function"), parts=array_of(_GEMINI_PART, 1)
)
_DECLARATION = object_schema(
    "name",
    name={"type": "string", "minLength": 1},
    description=STRING,
    parameters=ANY_OBJECT,
    parametersJsonSchema=ANY_OBJECT,
)
GEMINI = object_schema(
    "contents",
    contents=array_of(_CONTENT, 1),
    systemInstruction=object_schema(parts=array_of(object_schema("text", text=STRING))),
    tools=array_of(object_schema(functionDeclarations=array_of(_DECLARATION))),
    toolConfig=object_schema(
        functionCallingConfig=object_schema(
            mode=one_of("AUTO", "ANY", "NONE"), allowedFunctionNames=array_of(STRING)
        )
    ),
    generationConfig=object_schema(
        temperature=NUMBER,
        topP=NUMBER,
        topK=INTEGER,
        maxOutputTokens=COUNT,
        candidateCount=COUNT,
        seed=INTEGER,
        stopSequences=array_of({"type": "string", "minLength": 1}),
        responseMimeType=one_of("text/plain", "application/json"),
        responseJsonSchema=ANY_OBJECT,
        presencePenalty=NUMBER,
        frequencyPenalty=NUMBER,
        thinkingConfig=object_schema(
            includeThoughts=BOOL, thinkingBudget={**INTEGER, "minimum": -1}
        ),
    ),
)
GEMINI_COUNT = object_schema(
    contents=array_of(_CONTENT, 1), generateContentRequest=GEMINI, systemInstruction=ANY_OBJECT
)


def error(**fields: Json) -> Json:
    """The body of an error: what it says is an object of these fields."""
    return object_schema("error", error=object_schema(" ".join(fields), **fields))


OPENAI_ERROR = error(message=STRING, type=STRING)
ANTHROPIC_ERROR: Json = {
    **(_shape := error(message=STRING, type=STRING)),
    "required": ["type", "error"],
    "properties": {**_shape["properties"], "type": const("error")},
}
GOOGLE_ERROR = error(code={"type": "integer"}, message=STRING, status=STRING)

SCHEMAS: dict[str, Any] = {
    "ChatCompletionRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "EmbeddingRequest": EMBEDDING,
    "ResponseRequest": closed_object(RESPONSE),
    "MessageRequest": closed_object(MESSAGE),
    "TokenCountRequest": closed_object(TOKEN_COUNT),
    "GenerateContentRequest": GEMINI,
    "CountTokensRequest": GEMINI_COUNT,
    "OpenAIError": OPENAI_ERROR,
    "AnthropicError": ANTHROPIC_ERROR,
    "GoogleError": GOOGLE_ERROR,
}
