"""How far a served policy's log-probabilities are from the trainer's, by the dtype it is served in.

`python -m bench.trainer.served_precision` starts vLLM on a small random model, once for each dtype,
and prints a table (docs/training.md has it): right pushes, and one whose first block is stale. The
trainer's side is float32. On a CPU bfloat16 and fp8 need one with AVX-512 or AMX.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.tables import markdown
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.logprob_probe import (
    ProbeMismatchError,
    compare_logprobs,
    sample_probes,
)
from tracegrad_trainer.inference.publish import PROBE_PROMPTS
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.losses.logprob_gap import LogprobGap, served_precision
from tracegrad_trainer.utils.subprocesses import ChildError

VOCABULARY, PROMPT_TOKENS, SAMPLED = 400, 150, 32
HEADER = ("served in", "push", "median", "99 %", "mean", "verdict")
SERVED: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_per_channel": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
    "fp8_per_block": {"dtype": "bfloat16", "quantization": "fp8_per_block"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("served", nargs="*", default=list(SERVED), help="dtypes; default: all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(markdown(HEADER, measured_gaps(options.served)))
    return 0


def measured_gaps(served: Sequence[str]) -> list[list[str]]:
    """The table's rows, of each dtype."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_small_model(model)
        for name in served:
            try:
                rows += _measured(name, model, Path(folder) / name)
            except ChildError as error:
                rows.append([name, f"does not start: {str(error)[:80]}", "", "", "", ""])
    return rows


def save_small_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.08,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        **sizes,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def _measured(name: str, folder: Path, state: Path) -> list[list[str]]:
    settings = small_engine(name, folder, state)
    allowed = served_precision(settings.serving_dtype, on_cpu=settings.on_cpu)
    found = []

    def note(push: str, model: Any) -> None:
        gap, verdict = served_gap(settings.url, model, allowed)
        sizes = [f"{value:.1e}" for value in (gap.p50, gap.p99, gap.mean)]
        found.append([name, push, *sizes, verdict])

    with VllmProcess(settings) as engine:
        engine.wait_healthy()
        with WeightPusher(engine.url, checkpoint=folder) as pusher:
            for version in (1, 2):
                new = perturbed(load_small(folder), version)
                pusher.push(version, new.named_parameters())
                note("right", new)
            stale = perturbed(load_small(folder), 3)
            stale.model.layers[0].load_state_dict(new.model.layers[0].state_dict())
            pusher.push(3, stale.named_parameters())
            note("first block stale", perturbed(load_small(folder), 3))
    return found


def small_engine(name: str, folder: Path, state: Path) -> VllmSettings:
    """Of the model in `folder`, served in the dtype of this name; `state`: a new folder."""
    state.mkdir(mode=0o700)
    return VllmSettings(
        model=str(folder),
        socket=state / "vllm.sock",
        log=state / "vllm.log",
        max_model_len=1024,
        kv_cache_memory_bytes=128 << 20,
        tool_call_parser=None,
        **SERVED[name],
    )


def load_small(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def perturbed(model: Any, seed: int) -> Any:
    """Every parameter moved by a third of its own spread."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter += 0.3 * noise * parameter.std().clamp_min(0.05)
    return model


@torch.no_grad()
def served_gap(url: str, model: Any, allowed: Any) -> tuple[LogprobGap, str]:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (PROBE_PROMPTS, PROMPT_TOKENS), generator=draw).tolist()
    samples = sample_probes(url, prompts, tokens=SAMPLED)
    ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids] for one in samples])
    logits = model(ids).logits[:, PROMPT_TOKENS - 1 : -1].float().log_softmax(-1)
    trained = logits.gather(-1, ids[:, PROMPT_TOKENS:, None]).flatten().tolist()
    served = [value for one in samples for value in one.logprobs]
    try:
        return compare_logprobs(served, trained, allowed), "within"
    except ProbeMismatchError as error:
        return error.gap, "refused"


if __name__ == "__main__":
    sys.exit(main())
