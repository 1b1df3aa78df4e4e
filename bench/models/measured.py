"""What becomes of a family's model: a step is trained, its weights are exported in each form, and
each is compared with the trainer's own log-probabilities, in transformers and in vLLM."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from bench.gpu_check.models import random_rows
from bench.models.families import IMPORTS, VLLM, VOCABULARY
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    OptimSettings,
    build_sharded,
    destroy_process_group,
    init_process_group,
)
from tracegrad_trainer.engine.checkpoint.hf_export import save_hf
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.inference.logprob_probe import sample_probes
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.losses import preset
from tracegrad_trainer.utils.subprocesses import ChildError

LENGTHS = (60, 45, 30, 20)
PROMPT, PROMPTS, SAMPLED = 40, 8, 16


@dataclass(slots=True)
class Measured:
    """Largest differences of log-probabilities (nats) in transformers by form of export, the median
    one in vLLM; or why there is none. `rounding`: where vLLM has it in another dtype than float32,
    the median one of transformers in that dtype, of the same tokens."""

    name: str
    refused: str = ""
    transformers: dict[str, float | str] = field(default_factory=dict)
    vllm: float | str = ""
    rounding: tuple[str, float] | None = None


def measure(name: str, config: PreTrainedConfig, folder: Path, *, serve: bool) -> Measured:
    found = Measured(name)
    shutil.rmtree(folder, ignore_errors=True)
    model = folder / "model"
    _save(config, model)
    try:
        found.transformers["whole"] = _exported(model, folder / "whole", {})
    except ValueError as error:
        found.refused = str(error)
        return found
    for form in ("merged adapters", "adapters"):
        found.transformers[form] = _or_why(
            lambda form=form: _exported(model, folder / form, {"lora": {"rank": 4}}, form=form)  # type: ignore[misc]
        )
    if serve:
        found.vllm = _or_why(lambda: _served(found, folder / "whole", folder))
    return found


def _or_why(work: Callable[[], float]) -> float | str:
    try:
        return work()
    except (ValueError, ChildError, RuntimeError, httpx.HTTPError) as error:
        return str(error)


def _save(config: PreTrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "sinks" in name or "bias" in name:
            nn.init.normal_(parameter)  # zeros would hide what they do
    model.save_pretrained(folder)
    words = models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def _exported(model: Path, out: Path, settings: dict[str, Any], *, form: str = "whole") -> float:
    """How far transformers is from the trainer after a step."""
    made = random_rows(LENGTHS, VOCABULARY)
    learner = _trained(model, made, settings)
    try:
        (batches,) = pack(made, ranks=1, budget=sum(LENGTHS))
        [ours] = learner.logprobs(batches)
        order = [made[key] for key in batches[0].row_keys.tolist()]
        if form == "adapters":
            lora.save_adapter(learner.model, out)
        else:
            save_hf(learner.model, out, companions_from=model)
    finally:
        destroy_process_group()
    loaded: Any
    adapted = form == "adapters"
    loaded = PeftModel.from_pretrained(_loaded(model), out) if adapted else _loaded(out)
    return float((torch.cat([_logprobs(loaded.eval(), row) for row in order]) - ours).abs().max())


def _loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """With the attention that leaves nothing out: transformers' default has no soft caps."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def _trained(model: Path, made: Sequence[Row], settings: dict[str, Any]) -> Learner:
    fsdp = FsdpSettings.model_validate({"device": "cpu", "threads": 1, **settings})
    mesh = init_process_group(fsdp)
    try:
        learner = Learner(
            build_sharded(model, mesh, fsdp), mesh, preset("grpo"), OptimSettings(lr=1e-2)
        )
        (batches,) = pack(made, ranks=1, budget=sum(LENGTHS))
        assert learner.train(batches, version=0).applied
    except BaseException:
        destroy_process_group()
        raise
    return learner


@torch.no_grad()
def _logprobs(model: Any, row: Row) -> Tensor:
    ids = torch.from_numpy(row.input_ids).long()
    logits = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
    chosen: Tensor = logits.gather(-1, ids[1:, None])[:, 0]
    return chosen


def _served(found: Measured, model: Path, folder: Path) -> float:
    """The median difference of what vLLM samples from an export to transformers' of the same."""
    needed = IMPORTS.get(found.name)
    if needed and importlib.util.find_spec(needed) is None:
        raise ValueError(f"vLLM's code of it imports {needed}, which is not installed here")
    state = folder / "vllm"
    state.mkdir(mode=0o700)
    settings = VllmSettings(
        model=str(model),
        socket=state / "vllm.sock",
        log=state / "vllm.log",
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        tool_call_parser=None,
        **(options := {"dtype": "float32"} | VLLM.get(found.name, {})),
    )
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT), generator=draw).tolist()
    with VllmProcess(settings) as engine:
        engine.wait_healthy()
        samples = sample_probes(engine.url, prompts, tokens=SAMPLED)
    ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids] for one in samples])
    known = _sampled_logprobs(_loaded(model), ids)
    if (dtype := options["dtype"]) != "float32":
        rounded = _sampled_logprobs(_loaded(model, getattr(torch, dtype)), ids)
        found.rounding = (dtype, float((rounded - known).abs().median()))
    served = torch.tensor([value for one in samples for value in one.logprobs])
    return float((served - known).abs().median())


@torch.no_grad()
def _sampled_logprobs(model: Any, ids: Tensor) -> Tensor:
    logits = model.eval()(ids).logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
    chosen: Tensor = logits.gather(-1, ids[:, PROMPT:, None]).flatten()
    return chosen
