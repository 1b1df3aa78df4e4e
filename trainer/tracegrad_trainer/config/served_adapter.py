"""Which LoRA adapters vLLM can serve beside the model that they were made for.

All others are pushed merged: as the model's whole weights. Nothing here loads torch or vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path

from tracegrad_trainer.config.vllm import ADAPTER_RANKS
from tracegrad_trainer.engine.config import LoraSettings

# Dense text models of which vLLM 0.32 serves an adapter on each linear layer of a block
# (`supports_lora`). Of mixtures it wraps the experts too, trained or not.
SERVED_WITH_ADAPTERS = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
# vLLM takes one on the head of some vocabularies only, and another one on the embedding.
_NOT_BLOCKS = ("lm_head", "embed_tokens")


def why_not_served(
    model: Path, lora: LoraSettings | None, *, sleep_level: int | None
) -> str | None:
    """None: vLLM can serve such adapters of `model`, a checkpoint folder. `sleep_level`: of a vLLM
    that sleeps between pushes."""
    if lora is None:
        return "no adapters are trained (fsdp.lora)"
    if lora.rank > ADAPTER_RANKS[-1]:
        return f"fsdp.lora.rank = {lora.rank}: vLLM serves adapters up to rank {ADAPTER_RANKS[-1]}"
    names = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    if outside := [name for name in names if any(other in name for other in _NOT_BLOCKS)]:
        return f"fsdp.lora.targets: {outside[0]}: vLLM does not serve adapters of it for all models"
    architecture = _architecture(model)
    if architecture not in SERVED_WITH_ADAPTERS:
        return f"vLLM is not known to serve adapters of {architecture}"
    if sleep_level == 2:
        return "gpus.sleep_level = 2 throws the weights beneath the adapter away (1 keeps them)"
    return None


def _architecture(model: Path) -> str:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return str(config["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return "a model whose config.json names no architecture"
