"""The real chat templates that the tests read, each with what its model samples at the end of a
reply, and a tokenizer made on the spot that knows the template's special tokens."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core
from transformers.utils.chat_template_utils import render_jinja_template

from support.chat.chat_templates import chat_template
from tracegrad.chat.messages import RenderOptions
from tracegrad.chat.model import ChatFormat
from tracegrad.chat.renderer import Renderer
from tracegrad.chat.template import ChatTemplate
from tracegrad.chat.tokenizer import Tokenizer

Json = dict[str, Any]

NOW = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)
# What looks like a special token in a template's text.
_TAGS = re.compile(
    r"<[|｜/]?[A-Za-z][\w▁:|｜]{2,30}[|｜]?>|<\|[A-Za-z_]{2,30}>|<[A-Za-z_]{2,30}\|>|\[/?[A-Z_]{3,20}\]"
)
VARIABLES = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Family:
    """A template with arguments; the token after a text, and the one after tool calls."""

    template: str
    end: str
    call_end: str = ""
    kwargs: Json = field(default_factory=dict)
    parts: bool = False  # vLLM gives it contents as lists of parts

    @property
    def stop(self) -> dict[bool, str]:
        return {False: self.end, True: self.call_end or self.end}


FAMILIES = {
    "Qwen2.5": Family("Qwen-Qwen2.5-7B-Instruct", "<|im_end|>"),
    "Qwen3-Coder": Family("Qwen-Qwen3-Coder", "<|im_end|>"),
    "Kimi-K2": Family("moonshotai-Kimi-K2-Instruct", "<|im_end|>", parts=True),
    "Granite 4": Family("ibm-granite-granite-4.0", "<|end_of_text|>", parts=True),
    "DeepSeek-V3.1": Family("deepseek-ai-DeepSeek-V3.1", "<｜end▁of▁sentence｜>"),
    "DeepSeek-V3.1 think": Family(
        "deepseek-ai-DeepSeek-V3.1", "<｜end▁of▁sentence｜>", kwargs={"thinking": True}
    ),
    "Qwen3": Family("Qwen-Qwen3-0.6B", "<|im_end|>"),
    "Qwen3 no-think": Family("Qwen-Qwen3-0.6B", "<|im_end|>", kwargs={"enable_thinking": False}),
    "GLM-4.6": Family("zai-org-GLM-4.6", "<|user|>", "<|observation|>", parts=True),
    "GLM no-think": Family(
        "zai-org-GLM-4.6",
        "<|user|>",
        "<|observation|>",
        parts=True,
        kwargs={"enable_thinking": False},
    ),
    "Gemma 4": Family("google-gemma-4-31B-it", "<turn|>", "<|tool_response>", parts=True),
    "Gemma 4 think": Family(
        "google-gemma-4-31B-it",
        "<turn|>",
        "<|tool_response>",
        parts=True,
        kwargs={"enable_thinking": True},
    ),
    "Qwen3.5": Family("Qwen-Qwen3.5-4B", "<|im_end|>", parts=True),
    "Qwen3.5 no-think": Family(
        "Qwen-Qwen3.5-4B", "<|im_end|>", parts=True, kwargs={"enable_thinking": False}
    ),
    "MiniMax-M2": Family("MiniMaxAI-MiniMax-M2", "[e~[", parts=True),
    "gpt-oss": Family("openai-gpt-oss-120b", "<|return|>", "<|call|>"),
    "Llama-3.1": Family("meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>"),
    "Mistral Small 3.2": Family(
        "mistralai-Mistral-Small-3.2-24B-Instruct-2506", "<eos>", parts=True
    ),
    "Mistral Nemo": Family("mistralai-Mistral-Nemo-Instruct-2407", "<eos>"),
    "Hermes-3": Family("in-the-manner-of-Hermes-3", "<|im_end|>"),
    "Phi-4-mini": Family("microsoft-Phi-4-mini-instruct", "<|end|>"),
    "SmolLM3": Family("HuggingFaceTB-SmolLM3-3B", "<|im_end|>"),
    "LFM2": Family("in-the-manner-of-LFM2", "<|im_end|>"),
    "Gemma 3": Family("google-gemma-3-it", "<end_of_turn>", parts=True),
    "R1-Distill": Family("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<｜end▁of▁sentence｜>"),
    "Nemotron-Nano-v2": Family("in-the-manner-of-Nemotron-Nano-v2", "<SPECIAL_12>"),
}


@cache
def model(name: str) -> ChatFormat:
    family = FAMILIES[name]
    text = chat_template(family.template)
    tokens = {*_TAGS.findall(text), *family.stop.values(), *VARIABLES.values()}
    return ChatFormat(byte_tokenizer(sorted(tokens)), ChatTemplate(text, VARIABLES))


def byte_tokenizer(added: Sequence[str | AddedToken]) -> Tokenizer:
    """One token for each byte, and the added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([t if isinstance(t, AddedToken) else AddedToken(t) for t in added])
    return Tokenizer(core)


def engine_text(name: str, messages: Sequence[Json], tools: list[Json] | None) -> str:
    """What an engine renders: transformers' own code, on messages in the template's form."""
    family = FAMILIES[name]
    (text,), _ = render_jinja_template(
        [[template_form(message, family.parts) for message in messages]],
        tools=tools,
        chat_template=chat_template(family.template),
        add_generation_prompt=True,
        strftime_now=NOW.strftime,
        **{**VARIABLES, **family.kwargs},
    )
    return str(text)


def template_form(message: Json, parts: bool) -> Json:
    """Written out by hand for the messages of these tests: vLLM's form of a text message."""
    form = {**message, "content": message.get("content") or ""}
    if parts and message["role"] != "tool":
        texts = [form["content"]] if message.get("content") is not None else []
        form["content"] = [{"type": "text", "text": text} for text in texts]
    if reasoning := form.pop("reasoning", None):
        form |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls := form.pop("tool_calls", None):
        form["tool_calls"] = [
            {
                "id": call["id"],
                "function": {
                    "arguments": json.loads(call["function"]["arguments"]),
                    "name": call["function"]["name"],
                },
                "type": "function",
            }
            for call in calls
        ]
    return form


def fresh_ids(
    text: ChatFormat, messages: Sequence[Json], frame: RenderOptions, now: datetime
) -> array[int]:
    """The tokens of a prompt rendered afresh: what the engine makes of canonical messages."""
    renderer = Renderer(text, frame, now)
    return text.tokenizer.encode(
        renderer.render([renderer.message(message) for message in messages])
    )
