"""A tiny model of a real architecture, made on the spot: tokenizer, chat template, random weights.

Nothing is downloaded. The weights are random but wide enough (`initializer_range`) that
log-probabilities differ visibly between tokens and between two sets of weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# Tools and answers in the Hermes form; the history keeps every token that was sampled, so a
# later prompt extends an earlier prompt and its completion.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer in text or as <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>tool
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments \
if call.function.arguments is string else call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_CORPUS = [
    "How many lamps are in Oslo? There are 17 lamps in the shop.",
    "What does a chair cost in Rome? A chair costs 42 crowns.",
    '<tool_call>\n{"name": "stock", "arguments": {"item": "lamp", "city": "Oslo"}}\n</tool_call>',
    '{"type": "function", "function": {"name": "price", "description": "the price of an item", '
    '"parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}}',
    "You are a careful assistant. Answer with text or with a tool call. Tools: system user",
]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred tokens; the same on every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tags = ("<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def tiny_model(
    vocab_size: int, *, seed: int = 0, tied: bool = True, moe: bool = False
) -> PreTrainedModel:
    """A Qwen3 (or Qwen3-MoE) of about half a million parameters, fp32, in eval mode."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model: PreTrainedModel
    if moe:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, norm_topk_prob=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    return model.float().eval()


def tiny_sizes(vocabulary: int, **changes: Any) -> dict[str, Any]:
    """What a config of any family says for a model that makes a step in some 20 ms."""
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    return sizes | changes


def tiny_qwen3(vocabulary: int, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A Qwen3 of these sizes, with grouped heads."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    model = Qwen3ForCausalLM(Qwen3Config(**tiny_sizes(vocabulary, head_dim=8, **changes)))
    return model


def save_tiny_model(path: Path, *, seed: int = 0, tied: bool = True, moe: bool = False) -> Path:
    """Writes a checkpoint folder (weights, config, tokenizer) that vLLM and transformers load."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), seed=seed, tied=tied, moe=moe)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    generation = {"eos_token_id": 2, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load_model(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def perturb(model: PreTrainedModel, *, seed: int, scale: float = 0.3) -> PreTrainedModel:
    """Moves every parameter by `scale` of its own spread, in place: a new policy."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter += scale * noise * parameter.std().clamp_min(0.05)
    return model


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    completion: Sequence[int],
    temperature: float = 1.0,
) -> list[float]:
    """log p of each completion token (nats) by transformers' own forward, in fp32."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    picked = torch.tensor(list(completion)).unsqueeze(1)
    values: list[float] = logits.log_softmax(-1).gather(1, picked).squeeze(1).tolist()
    return values
