"""A body for every route with most of its fields, to be mangled."""

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
RESPONSE: Json = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": _PNG}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ],
    "tools": [{"type": "function", **_FUNCTION}, {"type": "custom", "name": "write"}],
    "tool_choice": {"type": "function", "name": "look"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "temperature": 1,
    "top_logprobs": 1,
    "max_output_tokens": 5,
    "parallel_tool_calls": True,
}
_CONVERSATION: Json = {
    "model": "m",
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": [1]}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
}
MESSAGE: Json = {
    **_CONVERSATION,
    "max_tokens": 100,
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 5,
    "metadata": {"user_id": "u"},
}
_CONTENTS: Json = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {
            "role": "user",
            "parts": [
                {"text": "look"},
                {"inlineData": {"mimeType": "image/png", "data": "QQ=="}},
            ],
        },
        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"at": 1}}}]},
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "look", "response": {"output": "seen"}}}],
        },
    ],
    "tools": [{"functionDeclarations": [_FUNCTION]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}},
}
GENERATE: Json = {
    **_CONTENTS,
    "generationConfig": {
        "temperature": 1,
        "topK": 4,
        "maxOutputTokens": 5,
        "candidateCount": 1,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
    },
}
FULL: dict[str, Json] = {
    "chat": CHAT,
    "completions": TEXT,
    "responses": RESPONSE,
    "messages": MESSAGE,
    "count_tokens": _CONVERSATION,
    "gemini": GENERATE,
    "gemini count": _CONTENTS,
}
