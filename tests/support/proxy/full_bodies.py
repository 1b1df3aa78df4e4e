"""A body for every route with most of its fields, to be mangled. `FULL` are within the served
OpenAPI document; `MOST` are by dialect, with what is served beyond it."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_SCHEMA: Json = {"type": "object", "properties": {"at": {"type": "integer"}}}
_PNG = "data:image/png;base64,QQ=="
_FUNCTION: Json = {"name": "look", "description": "d", "parameters": _SCHEMA}

CHAT: Json = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "name": "u",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": _PNG}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ],
    "tools": [{"type": "function", "function": {**_FUNCTION, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "n": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "seed": 3,
    "max_tokens": 5,
    "logit_bias": {"5": 1},
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"enable_thinking": True},
    "structured_outputs": {"choice": ["a"]},
    "return_token_ids": True,
    "include_reasoning": False,
}
TEXT: Json = {
    "model": "m",
    "prompt": ["a", [97, 98]],
    "stream_options": {"include_usage": True},
    "n": 1,
    "logprobs": 1,
    "echo": False,
    "max_tokens": 4,
    "temperature": 1,
    "stop": ["x"],
    "seed": 1,
    "logit_bias": {"1": 2},
    "return_token_ids": True,
}
_TOOL: Json = {"type": "function", **_FUNCTION, "strict": False}
_PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "Patches."}
RESPONSE: Json = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": _PNG}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
            "encrypted_content": "tg1.dA==",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "*"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": []},
    ],
    "tools": [
        _TOOL,
        {**_PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
    ],
    "tool_choice": {"type": "function", "name": "look"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "temperature": 1,
    "top_logprobs": 1,
    "max_output_tokens": 5,
    "parallel_tool_calls": True,
    "stream_options": {"include_obfuscation": False},
    "stop": "x",
}
_IMAGE: Json = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="},
}
MESSAGE: Json = {
    "model": "m",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "look"}, _IMAGE]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": [1]}},
                {"type": "tool_use", "id": "c2", "name": "find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "a"}, _IMAGE],
                    "is_error": False,
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ],
    "tools": [
        {"name": "look", "description": "d", "input_schema": {"type": "object"}, "strict": True},
        {"name": "find", "type": "custom", "input_schema": {"type": "object"}},
        {"name": "deep", "input_schema": {"type": "object"}, "defer_loading": True},
    ],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "chat_template_kwargs": {"enable_thinking": True},
}
_INLINE: Json = {"inlineData": {"mimeType": "image/png", "data": "QQ=="}}
_OPENAPI_SCHEMA: Json = {
    "type": "OBJECT",
    "nullable": True,
    "properties": {
        "a": {"type": "STRING", "enum": ["x"], "format": "enum", "maxLength": "3"},
        "b": {"anyOf": [{"type": "ARRAY", "items": {"type": "INTEGER"}}], "nullable": True},
    },
    "propertyOrdering": ["b", "a"],
    "additionalProperties": {"type": "NULL"},
    "defs": {"D": {"ref": "#"}},
}
GENERATE: Json = {
    "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "look"}, _INLINE]},
        {
            "role": "model",
            "parts": [
                {"text": "Hm.", "thought": True},
                {"text": "I look.", "thoughtSignature": "QQ=="},
                {"functionCall": {"id": "c1", "name": "look", "args": {"at": [1]}}},
                {"functionCall": {"name": "see", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "a"}}},
                {"functionResponse": {"name": "see", "response": {"x": 1}, "parts": [_INLINE]}},
                {"text": "and?"},
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "look", "description": "d", "parameters": _OPENAPI_SCHEMA},
                {"name": "see", "parametersJsonSchema": {"type": "object"}},
                {"name": "hear"},
            ]
        }
    ],
    "toolConfig": {
        "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look", "see"]}
    },
    "generationConfig": {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64,
        "candidateCount": 1,
        "maxOutputTokens": 100,
        "stopSequences": ["x"],
        "seed": 1,
        "presencePenalty": 0,
        "frequencyPenalty": 0,
        "responseMimeType": "application/json",
        "responseSchema": _OPENAPI_SCHEMA,
        "responseLogprobs": True,
        "logprobs": 2,
        "responseModalities": ["TEXT"],
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
    },
    "safetySettings": [{"category": "c", "threshold": "t"}],
}
# What a prompt is made of, which is what the routes that count tokens read.
_NO_PROMPT = (
    "max_tokens",
    "stop_sequences",
    "temperature",
    "top_p",
    "top_k",
    "metadata",
)
_GEMINI_PROMPT = ("systemInstruction", "contents", "tools", "toolConfig")
FULL: dict[str, Json] = {
    "chat": CHAT,
    "completions": TEXT,
    "responses": RESPONSE,
    "messages": MESSAGE,
    "count_tokens": {name: value for name, value in MESSAGE.items() if name not in _NO_PROMPT},
    "gemini": GENERATE,
    "gemini count": {name: GENERATE[name] for name in _GEMINI_PROMPT},
}

MOST: dict[str, Json] = {
    **FULL,
    "responses": {
        **RESPONSE,
        "input": [
            *RESPONSE["input"],
            {"type": "additional_tools", "role": "developer", "tools": [{**_TOOL, "name": "more"}]},
        ],
        "tools": [
            *RESPONSE["tools"],
            {"type": "namespace", "name": "n", "description": "d", "tools": [_TOOL]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "n__look"}]},
    },
    "messages": {
        **MESSAGE,
        "stream": True,
        "messages": [
            *MESSAGE["messages"],
            {"role": "system", "content": "It is late.", "clear_at": "never"},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "content": [{"type": "tool_reference", "tool_name": "deep"}],
                    },
                ],
            },
        ],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
    "gemini": {
        **GENERATE,
        "contents": [
            *GENERATE["contents"],
            {
                "role": "user",
                "parts": [{"fileData": {"mimeType": "image/png", "fileUri": "https://x/y.png"}}],
            },
        ],
    },
}
