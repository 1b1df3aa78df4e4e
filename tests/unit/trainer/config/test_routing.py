"""What `fsdp.routing = "r3"` asks of vLLM, the proxy and the model, and where it is refused."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.trainer.row_samples import VOCABULARY
from support.trainer.step_samples import fill, trainer_settings
from support.trainer.tiny_model import tiny_sizes
from tracegrad.store import ALL, Store
from tracegrad_trainer.cli import dry_run
from tracegrad_trainer.cli.serve import StartError, check_startup, proxy_process
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import FsdpSettings
from tracegrad_trainer.engine.model import memory
from tracegrad_trainer.sft.config import load_sft_settings

FLAG = "--enable-return-routed-experts"


def mixture(folder: Path) -> Path:
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**tiny_sizes(VOCABULARY, head_dim=8, **experts))
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def settings_with(folder: Path, routing: str, *, device: str = "cpu") -> TrainerSettings:
    fsdp = {"device": "cpu", "threads": 1, "routing": routing}
    return trainer_settings(folder, fsdp=fsdp, vllm={"device": device})


@pytest.mark.parametrize(("routing", "asked"), [("own", False), ("r2", False), ("r3", True)])
def test_vllm_and_the_proxy_are_asked_for_routes_that_are_replayed(
    tmp_path: Path, routing: str, asked: bool
) -> None:
    settings = settings_with(tmp_path, routing, device="cuda")
    assert (FLAG in settings.vllm.arguments()) == asked
    wanted = proxy_process(settings).env.get("TRACEGRAD_PROXY_ROUTED_EXPERTS")
    assert (str(wanted).lower() in ("true", "1")) == asked


def test_an_engine_on_a_cpu_is_refused_before_it_starts(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, "r3")
    with (
        Store.open(settings.proxy.store) as store,
        pytest.raises(StartError, match=r"fsdp\.routing = 'r3': vLLM.*on GPUs only.*'r2'"),
    ):
        check_startup(settings, store)


@pytest.mark.parametrize("routing", ["r2", "r3"])
def test_a_model_without_experts_is_refused_before_it_is_read(tmp_path: Path, routing: str) -> None:
    settings = settings_with(tmp_path, routing)
    for name in ("model", "mixture"):
        folder = settings.model if name == "model" else mixture(tmp_path / name)
        (folder / "model.safetensors").unlink()

    def asked(folder: Path) -> memory.MemoryEstimate:
        wanted = FsdpSettings.model_validate({"device": "cpu", "routing": routing})
        return memory.check_fits_memory(folder, wanted, ranks=1, local_ranks=1, tokens=64)

    assert asked(tmp_path / "mixture").parameters > 0
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no routers.*fsdp.routing = 'own'"):
        asked(settings.model)


def test_traces_that_are_imitated_have_no_engines_routes(tmp_path: Path) -> None:
    learned = trainer_settings(tmp_path, objective={"preset": "sft"}).objective
    replayed = settings_with(tmp_path, "r3").model_copy(update={"objective": learned})
    with pytest.raises(ValueError, match=r"fsdp\.routing = 'r3' .*trainer sft set it to 'own'"):
        load_sft_settings(replayed, ALL, preset="sft")


def test_a_dry_run_says_that_no_route_is_known(tmp_path: Path) -> None:
    mixture(tmp_path / "model")
    settings = settings_with(tmp_path, "r3")
    with Store.open(settings.proxy.store) as store:
        fill(store, 2)
    out = StringIO()
    assert dry_run.show_dry_run(settings, Console(file=out, width=300), as_json=False) == 0
    assert "recorded the experts of none of these tokens: they would be routed" in out.getvalue()
    assert FLAG in out.getvalue()
    out = StringIO()
    assert (
        dry_run.show_dry_run(settings_with(tmp_path, "r2"), Console(file=out), as_json=False) == 0
    )
    assert "experts" not in out.getvalue()
