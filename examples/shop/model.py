"""A small Qwen3 with a tokenizer of its own, in the directory format that vLLM serves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

PAD, SYSTEM, USER, ASSISTANT, TOOL, END = SPECIAL_TOKENS = (
    *("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
)
# Ordinary tokens, not special ones: the tool parser has to see them in the text.
TOOL_CALL_TOKENS = ("<tool_call>", "</tool_call>")
TAGS = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, *TOOL_CALL_TOKENS))))

# A tool is one line, `name(parameter, ...) description`. A tool call is printed the way
# `json.dumps` prints it, so that a client which parses it and sends it back changes no token.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|system|>
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{ function.name }}({{ function.parameters.properties | join(', ') }}) {{ function.description }}
{{- '' if loop.last else '\\n' -}}
{%- endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
<tool_call>{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments \
if call.arguments is string else call.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over words and single digits; it keeps every text as it is."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        (part for text in texts for part in TAGS.split(text)),
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(TOOL_CALL_TOKENS),
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_tokens(list(TOOL_CALL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT, TOOL],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int) -> Any:
    """A randomly initialised `Qwen3ForCausalLM` in fp32; torch's generator decides the weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.06,  # near 1/sqrt(hidden): so small a model learns faster from it
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def save(model: Any, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Writes config, generation config, weights (safetensors), tokenizer and chat template."""
    disable_progress_bar()  # the demo has its own
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
