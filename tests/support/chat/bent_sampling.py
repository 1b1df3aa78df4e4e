"""Sampling settings of which each bends the distribution."""

from __future__ import annotations

from typing import Any

FUNCTION = {"name": "look", "description": "", "parameters": {"type": "object"}}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
BENT: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "min_tokens": 3,
    "vllm_xargs": {"boost": 2},
    "logits_processors": ["boost"],
    "use_beam_search": True,
    "watermarking": True,
    "parallel_tool_calls": False,
    "tools": [STRICT],
}
