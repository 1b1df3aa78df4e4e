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


def constant(value: str) -> Json:
    return {"type": "string", "const": value}


def listed(items: Json, least: int = 0) -> Json:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def either(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def record(needed: str = "", /, **fields: Json) -> Json:
    """An object; `needed` names the fields that it must have."""
    required = needed.split()
    schema: Json = {
        "type": "object",
        "properties": {
            name: field if name in required else either(field, {"type": "null"})
            for name, field in fields.items()
        },
    }
    return {**schema, "required": required} if required else schema


def closed(schema: Json) -> Json:
    """The object without any other fields."""
    return {**schema, "additionalProperties": False}


def _typed(kind: str, needed: str = "", /, **fields: Json) -> Json:
    return record(f"type {needed}", type=constant(kind), **fields)


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

_FUNCTION = record("name", name=STRING, description=STRING, parameters=ANY_OBJECT, strict=BOOL)
_TOOL_CALL = record("function", id=STRING, type=STRING, function=record("name", name=STRING))
_CHAT_MESSAGE = record(
    "role",
    role=STRING,
    content=either(STRING, listed(either(STRING, ANY_OBJECT))),
    tool_calls=listed(_TOOL_CALL),
    tool_call_id=STRING,
    reasoning=STRING,
)
CHAT = record(
    "messages",
    model=STRING,
    messages=listed(_CHAT_MESSAGE, 1),
    stream=BOOL,
    stream_options=record(include_usage=BOOL),
    n=COUNT,
    max_completion_tokens=COUNT,
    tools=listed(_typed("function", "function", function=_FUNCTION)),
    tool_choice=either(one_of("none", "auto", "required"), ANY_OBJECT),
    parallel_tool_calls=BOOL,
    response_format=ANY_OBJECT,
    stop=either(STRING, listed(STRING)),
    seed=INTEGER,
    logprobs=BOOL,
    return_token_ids=BOOL,
    include_reasoning=BOOL,
    **_SAMPLING,
)
_PROMPT = either(
    {"type": "string", "minLength": 1},
    listed(INTEGER, 1),
    listed(either(STRING, listed(INTEGER)), 1),
)
COMPLETION = record(
    "prompt",
    model=STRING,
    prompt=_PROMPT,
    stream=BOOL,
    stream_options=record(include_usage=BOOL),
    n=COUNT,
    max_tokens=COUNT,
    echo=BOOL,
    stop=either(STRING, listed(STRING)),
    seed=INTEGER,
    logprobs=INTEGER,
    return_token_ids=BOOL,
    **_SAMPLING,
)
EMBEDDING = record("input", model=STRING, input=either(STRING, listed(either(STRING, INTEGER), 1)))

# Responses

_INPUT_PART = either(
    _typed("input_text", "text", text=STRING),
    _typed("output_text", "text", text=STRING),
    _typed("refusal", "refusal", refusal=STRING),
    _typed("input_image", "image_url", image_url=STRING, detail=one_of("auto", "low", "high")),
    _typed("input_audio", "input_audio", input_audio=ANY_OBJECT),
)
_PARTS = either(STRING, listed(_INPUT_PART))
_SUMMARY = record("text", text=STRING)
_ITEM = either(
    record(
        "role content",
        type=constant("message"),
        role=one_of("user", "assistant", "system", "developer"),
        content=_PARTS,
    ),
    _typed(
        "function_call", "call_id name arguments", call_id=STRING, name=STRING, arguments=STRING
    ),
    _typed("function_call_output", "call_id output", call_id=STRING, output=_PARTS),
    _typed("custom_tool_call", "call_id name input", call_id=STRING, name=STRING, input=STRING),
    _typed("custom_tool_call_output", "call_id output", call_id=STRING, output=_PARTS),
    _typed("reasoning", summary=listed(_SUMMARY), content=listed(_SUMMARY)),
)
_RESPONSES_TOOL = either(
    _typed("function", "name", name=STRING, description=STRING, parameters=ANY_OBJECT, strict=BOOL),
    _typed("custom", "name", name=STRING, description=STRING),
)
_TEXT_FORMAT = either(
    _typed("text"),
    _typed("json_object"),
    _typed("json_schema", "name schema", name=STRING, schema=ANY_OBJECT, strict=BOOL),
)
RESPONSE = record(
    model=STRING,
    input=either(STRING, listed(_ITEM, 1)),
    instructions=STRING,
    previous_response_id=STRING,
    stream=BOOL,
    stream_options=ANY_OBJECT,
    max_output_tokens=COUNT,
    tools=listed(_RESPONSES_TOOL),
    tool_choice=either(one_of("none", "auto", "required"), ANY_OBJECT),
    parallel_tool_calls=BOOL,
    reasoning=record(
        effort=one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        summary=one_of("auto", "concise", "detailed"),
    ),
    text=record(format=_TEXT_FORMAT, verbosity=one_of("low", "medium", "high")),
    include=listed(one_of("message.output_text.logprobs", "reasoning.encrypted_content")),
    include_reasoning=BOOL,
    top_logprobs={"type": "integer", "minimum": 0, "maximum": 20},
    stop=either(STRING, listed(STRING)),
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
_SOURCE = either(
    _typed("base64", "media_type data", media_type=STRING, data=STRING),
    _typed("url", "url", url=STRING),
)
_IMAGE_BLOCK = _typed("image", "source", source=_SOURCE)
_RESULT_BLOCK = _typed(
    "tool_result",
    "tool_use_id",
    tool_use_id=STRING,
    content=either(STRING, listed(either(_TEXT_BLOCK, _IMAGE_BLOCK))),
    is_error=BOOL,
)
_ASSISTANT_BLOCK = either(
    _TEXT_BLOCK,
    _typed("thinking", "thinking", thinking=STRING, signature=STRING),
    _typed("redacted_thinking", data=STRING),
    _typed("tool_use", "id name input", id=STRING, name=STRING, input=ANY_OBJECT),
)
_MESSAGE = either(
    record(
        "role content",
        role=constant("user"),
        content=either(STRING, listed(either(_TEXT_BLOCK, _IMAGE_BLOCK, _RESULT_BLOCK))),
    ),
    record(
        "role content",
        role=constant("assistant"),
        content=either(STRING, listed(_ASSISTANT_BLOCK)),
    ),
)
_CONVERSATION: dict[str, Json] = {
    "model": {"type": "string", "minLength": 1},
    "messages": listed(_MESSAGE, 1),
    "system": either(STRING, listed(_TEXT_BLOCK)),
    "tools": listed(
        record(
            "name input_schema",
            type=constant("custom"),
            name={"type": "string", "minLength": 1},
            description=STRING,
            input_schema=ANY_OBJECT,
            strict=BOOL,
        )
    ),
    "tool_choice": either(
        record("type", type=one_of("auto", "any", "none"), disable_parallel_tool_use=BOOL),
        _typed("tool", "name", name=STRING, disable_parallel_tool_use=BOOL),
    ),
    "thinking": either(
        record("type", type=one_of("adaptive", "disabled")),
        _typed("enabled", "budget_tokens", budget_tokens={**COUNT, "minimum": 0}),
    ),
    "output_config": closed(
        record(
            effort=one_of("low", "medium", "high", "xhigh", "max"),
            format=_typed("json_schema", "schema", schema=ANY_OBJECT),
        )
    ),
    "chat_template_kwargs": ANY_OBJECT,
}
MESSAGE = record(
    "model messages max_tokens",
    max_tokens=COUNT,
    stream=BOOL,
    stop_sequences=listed({"type": "string", "minLength": 1}),
    temperature=NUMBER,
    top_p=NUMBER,
    top_k=INTEGER,
    metadata=ANY_OBJECT,
    service_tier=STRING,
    **_CONVERSATION,
)
TOKEN_COUNT = record("model messages", **_CONVERSATION)

# Gemini; fields may also be spelled with underscores.

_GEMINI_PART = either(
    record("text", text=STRING, thought=BOOL),
    record("inlineData", inlineData=record("mimeType data", mimeType=STRING, data=STRING)),
    record("functionCall", functionCall=record("name", id=STRING, name=STRING, args=ANY_OBJECT)),
    record(
        "functionResponse",
        functionResponse=record("name", id=STRING, name=STRING, response=ANY_OBJECT),
    ),
)
_CONTENT = record("parts", role=one_of("user", "model", "function"), parts=listed(_GEMINI_PART, 1))
_DECLARATION = record(
    "name",
    name={"type": "string", "minLength": 1},
    description=STRING,
    parameters=ANY_OBJECT,
    parametersJsonSchema=ANY_OBJECT,
)
GEMINI = record(
    "contents",
    contents=listed(_CONTENT, 1),
    systemInstruction=record(parts=listed(record("text", text=STRING))),
    tools=listed(record(functionDeclarations=listed(_DECLARATION))),
    toolConfig=record(
        functionCallingConfig=record(
            mode=one_of("AUTO", "ANY", "NONE"), allowedFunctionNames=listed(STRING)
        )
    ),
    generationConfig=record(
        temperature=NUMBER,
        topP=NUMBER,
        topK=INTEGER,
        maxOutputTokens=COUNT,
        candidateCount=COUNT,
        seed=INTEGER,
        stopSequences=listed({"type": "string", "minLength": 1}),
        responseMimeType=one_of("text/plain", "application/json"),
        responseJsonSchema=ANY_OBJECT,
        presencePenalty=NUMBER,
        frequencyPenalty=NUMBER,
        thinkingConfig=record(includeThoughts=BOOL, thinkingBudget={**INTEGER, "minimum": -1}),
    ),
)
GEMINI_COUNT = record(
    contents=listed(_CONTENT, 1), generateContentRequest=GEMINI, systemInstruction=ANY_OBJECT
)


def error(**fields: Json) -> Json:
    """The body of an error: what it says is an object of these fields."""
    return record("error", error=record(" ".join(fields), **fields))


OPENAI_ERROR = error(message=STRING, type=STRING)
ANTHROPIC_ERROR: Json = {
    **(_shape := error(message=STRING, type=STRING)),
    "required": ["type", "error"],
    "properties": {**_shape["properties"], "type": constant("error")},
}
GOOGLE_ERROR = error(code={"type": "integer"}, message=STRING, status=STRING)

SCHEMAS: dict[str, Any] = {
    "ChatCompletionRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "EmbeddingRequest": EMBEDDING,
    "ResponseRequest": closed(RESPONSE),
    "MessageRequest": closed(MESSAGE),
    "TokenCountRequest": closed(TOKEN_COUNT),
    "GenerateContentRequest": GEMINI,
    "CountTokensRequest": GEMINI_COUNT,
    "OpenAIError": OPENAI_ERROR,
    "AnthropicError": ANTHROPIC_ERROR,
    "GoogleError": GOOGLE_ERROR,
}
