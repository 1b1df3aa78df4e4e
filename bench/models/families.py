"""Small random models of the families that people train, with heads that vLLM's CPU build takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 400
WINDOW = 32
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2}


def _of(kind: type[PreTrainedConfig], **changes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: kind(**(_SIZES | changes))


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Llama": _of(LlamaConfig),
    "Qwen 2": _of(Qwen2Config),
    "Qwen 3": _of(Qwen3Config, head_dim=32, tie_word_embeddings=True),
    "Qwen 3 MoE": _of(
        Qwen3MoeConfig, head_dim=32, num_experts=8, moe_intermediate_size=64, **_EXPERTS
    ),
    "Qwen 3.5": _of(
        Qwen3_5TextConfig,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "Gemma 2": _of(Gemma2Config, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
    "Gemma 3": _of(
        Gemma3TextConfig,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        query_pre_attn_scalar=32,
    ),
    "Gemma 4": _of(
        Gemma4TextConfig,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        final_logit_softcapping=20.0,
    ),
    "Mistral": _of(MistralConfig, sliding_window=WINDOW),
    "GPT-OSS": _of(
        GptOssConfig,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        num_local_experts=8,
        **_EXPERTS,
    ),
    "OLMoE": _of(OlmoeConfig, num_experts=8, num_key_value_heads=4, **_EXPERTS),
    "Granite": _of(GraniteConfig),
    "DeepSeek-V3-shaped": _of(
        DeepseekV3Config,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=512,  # with the 64 beside it as published: vLLM's kernels have no other
        qk_rope_head_dim=64,
        rope_parameters={  # plain rotations of pairs go wrong in vLLM's CPU kernel
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",  # transformers knows no other; vLLM asks
        scoring_func="sigmoid",
        moe_intermediate_size=64,
        n_shared_experts=1,
        **_EXPERTS,
    ),
}
# How vLLM's CPU build must be asked (gated delta rules are in bfloat16 alone, and so is its faster
# kernel for MLA), and what its code of a family imports.
VLLM: dict[str, dict[str, Any]] = {
    "Qwen 3.5": {"dtype": "bfloat16"},
    "DeepSeek-V3-shaped": {"extra_args": ["--attention-backend", "CPU_MLA"]},
}
IMPORTS = {"Qwen 3.5": "torchvision"}
