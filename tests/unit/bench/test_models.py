"""The table of kinds of models: what is measured, and what is said where something fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench.models import __main__ as program
from bench.models import measured
from bench.models.families import FAMILIES, VOCABULARY
from transformers import RecurrentGemmaConfig

from support.trainer.tiny_model import tiny_sizes

EXACT = 1e-4  # of float32, through two layers (of Qwen 3.5 with a triangular system) and a softmax


@pytest.mark.parametrize("name", ["Gemma 4", "DeepSeek-V3-shaped", "Qwen 3.5"])
def test_exports_say_what_the_trainer_says(name: str, tmp_path: Path) -> None:
    """Kinds that no other test exports."""
    torch.set_num_threads(1)
    found = measured.measure(name, FAMILIES[name](), tmp_path / "m", serve=False)
    assert found.refused == ""
    assert list(found.transformers) == ["whole", "merged adapters", "adapters"]
    # Not 0: the trainer packs rows, transformers has them one by one.
    assert all(isinstance(gap, float) and 0 < gap < EXACT for gap in found.transformers.values())


def test_what_is_exported_wrongly_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = measured.save_hf

    def off(model: Any, folder: Path, **more: Any) -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.01)
        save(model, folder, **more)

    monkeypatch.setattr(measured, "save_hf", off)
    found = measured.measure("Llama", FAMILIES["Llama"](), tmp_path / "m", serve=False)
    assert float(found.transformers["whole"]) > 20 * EXACT


def test_the_page_says_which_are_refused_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = tiny_sizes(VOCABULARY, block_types=["recurrent", "attention"], lru_width=32)
    monkeypatch.setitem(FAMILIES, "Griffin", lambda: RecurrentGemmaConfig(**sizes))
    out = tmp_path / "page.md"
    assert program.main(["--quick", "--only", "Griffin", "--out", str(out)]) == 0
    page = out.read_text()
    assert page.strip() in capsys.readouterr().out
    assert "| Griffin | no (1) |" in page
    assert "1. Griffin: RecurrentGemmaForCausalLM has" in page


def test_what_fails_in_one_form_is_a_note() -> None:
    one = measured.Measured("A", "", {"whole": 1e-6, "merged adapters": "no\nroom"}, "not started")
    page = program.page([one], with_vllm=False)
    assert "| A | yes | 1e-06 | no (1) | no (2) |" in page
    assert "1. A: no room\n2. A: not started" in page


def test_another_dtype_in_vllm_is_a_note_with_its_own_rounding() -> None:
    one = measured.Measured("A", "", {"whole": 1e-6}, 2e-2, ("bfloat16", 1e-2))
    page = program.page([one], with_vllm=False)
    assert "| A | yes | 1e-06 | 2e-02 (1) |" in page
    assert "1. A: vLLM's CPU build has it in bfloat16 alone, in which transformers is 1e-02" in page


def test_what_one_dtype_rounds_is_found(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    measured._save(FAMILIES["Qwen 3"](), tmp_path)
    ids = torch.randint(3, VOCABULARY, (4, measured.PROMPT + measured.SAMPLED))
    exact, half = (
        measured._sampled_logprobs(measured._loaded(tmp_path, dtype), ids)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact.shape == (4 * measured.SAMPLED,)
    assert 1e-4 < float((half - exact).abs().median()) < 0.1
