"""What of `[fsdp]` does not go with the model is refused before any weights are read."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.trainer.step_samples import trainer_settings
from support.trainer.tiny_models import CONFIGS
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.model import compile as compiled
from tracegrad_trainer.rl import preflight
from tracegrad_trainer.rl.preflight import check_layout, check_memory


def folder_of(kind: str, folder: Path) -> Path:
    AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def settings(tmp_path: Path, kind: str, fsdp: dict[str, Any], **others: Any) -> TrainerSettings:
    return trainer_settings(
        tmp_path,
        model=folder_of(kind, tmp_path / kind),
        fsdp={"device": "cpu", "threads": 1, **fsdp},
        **others,
    )


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("qwen3", {"context_parallel": 3}, 3, r"fsdp\.context_parallel = 3: each rank takes some of"),
    ("qwen3", {"context_parallel": 2}, 3, r"fsdp\.context_parallel = 2: 3 ranks cannot be divided"),
    ("qwen3", {"replicas": 2}, 3, r"fsdp\.replicas = 2: 3 ranks cannot hold as many copies"),
    ("olmoe", {"compile": True}, 1, r"fsdp\.compile = true: OlmoeForCausalLM is a mixture"),
    ("gpt_oss", {"gradient_checkpointing": "selective"}, 1, "'selective': GptOss.* set it to true"),
    ("qwen3", {"experts": "eager"}, 1, r"fsdp\.experts = 'eager': .* set fsdp\.experts = 'auto'"),
    ("qwen3", {"lora": {"targets": ["nothing"]}}, 1, r"fsdp\.lora"),
    ("qwen3", {"routing": "r2"}, 1, r"fsdp\.routing"),
]


@pytest.mark.parametrize(("kind", "fsdp", "ranks", "said"), REFUSED)
def test_what_the_model_does_not_go_with_is_refused(
    tmp_path: Path, kind: str, fsdp: dict[str, Any], ranks: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_memory(settings(tmp_path, kind, fsdp, ranks=ranks))


def test_a_reference_model_is_looked_at_too(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        "qwen3",
        {"compile": True},
        reference=folder_of("olmoe", tmp_path / "olmoe"),
        objective={"kl": "k3", "kl_coef": 0.1},
    )
    with pytest.raises(ValueError, match="OlmoeForCausalLM is a mixture"):
        check_memory(found)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "deepseek_v3", "gemma4"])
@pytest.mark.parametrize("fsdp", [{}, {"context_parallel": 2}, {"gradient_checkpointing": True}])
def test_what_goes_together_is_let_through(tmp_path: Path, kind: str, fsdp: dict[str, Any]) -> None:
    check_memory(settings(tmp_path, kind, fsdp, ranks=2))


def test_no_weights_are_read_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    prepare = preflight.prepare_model
    monkeypatch.setattr(
        preflight, "prepare_model", lambda *given: made.append(prepare(*given)) or made[-1]
    )
    check_memory(settings(tmp_path, "qwen3", {}))
    assert all(parameter.is_meta for parameter in made[0].parameters())


@pytest.mark.parametrize(
    ("kind", "fsdp", "batches", "said"),
    [
        ("gemma2", {}, {}, r"the attention of Gemma2ForCausalLM \(soft caps or sinks\) needs"),
        ("gpt_oss", {}, {}, "the attention of GptOssForCausalLM"),
        ("qwen3", {}, {"shared_prefix": "tree"}, r"batches\.shared_prefix = 'tree' needs"),
        ("qwen3", {"compile": True}, {}, r"fsdp\.compile = true needs"),
        ("qwen3", {}, {}, None),
        ("gemma2", {"attention": "packed"}, {}, None),
    ],
)
def test_kernels_that_are_compiled_need_a_compiler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fsdp: dict[str, Any],
    batches: dict[str, str],
    said: str | None,
) -> None:
    """Not in the first step, on a GPU, but at the start."""
    asked = settings(tmp_path, kind, fsdp | {"compute_dtype": "bfloat16"}, batches=batches)
    monkeypatch.setattr(preflight, "pick_device", lambda _: torch.device("cuda"))
    check_layout(asked)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name == "g++" or None)
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda *_: str(tmp_path))
    lacks = rf"a C compiler \(gcc or clang\) and Python's headers \({tmp_path}/Python\.h\) on"
    with nullcontext() if said is None else pytest.raises(ValueError, match=f"{said}.*{lacks}"):
        check_layout(asked)
    monkeypatch.setattr(preflight, "pick_device", lambda _: torch.device("cpu"))
    if not {"attention", "compile"} & fsdp.keys():
        check_layout(asked)
