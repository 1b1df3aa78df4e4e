"""Tiny random models of many kinds, made from configs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from support.trainer.tiny_model import tiny_sizes
from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model.forward import to_inputs
from tracegrad_trainer.engine.model.parallelize import prepare_model

VOCABULARY = 61
# Shorter than most rows of the tests.
WINDOW = 7

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_STATE = ["linear_attention", "full_attention"]
_MIXED = ["sliding_attention", "full_attention"]
_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
_MAMBA: dict[str, Any] = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}


def _of(kind: type, **changes: Any) -> Callable[[], Any]:
    return lambda: kind(**tiny_sizes(VOCABULARY, **_SPECIAL, **changes))


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2": _of(Qwen2Config),
    "qwen3": _of(Qwen3Config, head_dim=8),
    "llama": _of(LlamaConfig),
    "mistral": _of(MistralConfig, sliding_window=WINDOW),
    "gemma2": _of(
        Gemma2Config,
        head_dim=8,
        sliding_window=WINDOW,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": _of(
        Gemma3TextConfig,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        query_pre_attn_scalar=8,
    ),
    # Its full layers have wider heads than its sliding ones, and keys that are values too. Each
    # layer has an embedding of its own, by default of 262,144 words.
    "gemma4": _of(
        Gemma4TextConfig,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        final_logit_softcapping=20.0,
    ),
    "cohere2": _of(Cohere2Config, sliding_window=WINDOW, layer_types=_MIXED),
    "phi3": _of(Phi3Config, sliding_window=WINDOW),
    "olmo2": _of(Olmo2Config),
    "gpt_neox": _of(GPTNeoXConfig),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
    ),
    "granite": _of(GraniteConfig, attention_multiplier=0.3),
    "mixtral": _of(MixtralConfig, num_local_experts=6, num_experts_per_tok=2),
    "qwen3_moe": _of(Qwen3MoeConfig, head_dim=8, moe_intermediate_size=24, **_MOE),
    "olmoe": _of(OlmoeConfig, norm_topk_prob=False, **_MOE),
    "granite_moe": _of(GraniteMoeConfig, num_local_experts=6, num_experts_per_tok=2),
    # Keys wider than values (MLA), a dense layer before the experts, and one expert for all.
    "deepseek_v3": _of(
        DeepseekV3Config,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        n_shared_experts=1,
    ),
    "gpt_oss": _of(
        GptOssConfig,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    # Layers that carry a state along a row, beside those with attention: gated delta rules, short
    # convolutions, Mamba 2 in front of experts, and Mamba 2 with attention in the same layer.
    "qwen3_5": _of(
        Qwen3_5TextConfig,
        head_dim=8,
        layer_types=_STATE,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "lfm2": _of(Lfm2Config, layer_types=["conv", "full_attention"]),
    "granite_hybrid": _of(
        GraniteMoeHybridConfig,
        layer_types=_STATE,
        mamba_n_heads=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        **_MAMBA,
    ),
    "falcon_h1": _of(FalconH1Config, mamba_d_ssm=32, mamba_n_heads=4, **_MAMBA),
}
RECURRENT = ["qwen3_5", "lfm2", "granite_hybrid", "falcon_h1"]
MIXTURES = ["mixtral", "qwen3_moe", "olmoe", "granite_moe", "gpt_oss"]
# Attentions with which a model would not be exact, and what is said of them.
REFUSED = {
    ("gemma2", "sdpa"): "caps attention scores",
    ("gpt_oss", "sdpa"): "does not support an attention implementation",
    ("gpt_oss", "eager"): "rows of a pack see each other",
    ("granite_hybrid", "sdpa"): "rows of a pack see each other",
    ("granite_hybrid", "eager"): "rows of a pack see each other",
}


def make(name: str, attention: str = "packed", **settings: Any) -> nn.Module:
    """A prepared model in float32; the same weights for any attention."""
    chosen = {"packed": "tracegrad_packed", "varlen": "tracegrad_varlen"}.get(attention, attention)
    return prepare_model(plain(name, chosen), FsdpSettings(device="cpu", **settings))


def plain(name: str, attention: str = "eager") -> nn.Module:
    """The model as transformers makes it."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        CONFIGS[name](), dtype=torch.float32, attn_implementation=attention
    )
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name or "bias" in parameter_name:
            nn.init.normal_(parameter)  # zeros would hide what they do
    return model.eval()


def logprobs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Log-probabilities of a micro-batch's targets at their temperatures, by all their logits."""
    inputs = to_inputs(batch, model, torch.device("cpu"))
    logits = model(**inputs.model).logits[0] / inputs.temperature[:, None]
    chosen: Tensor = logits.log_softmax(-1).gather(-1, inputs.labels[:, None])[:, 0]
    return chosen
