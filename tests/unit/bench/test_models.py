"""The table of kinds of models: what is measured, and what is said where something fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench.models import __main__ as program
from bench.models import measured
from bench.models.families import FAMILIES

EXACT = 2e-5  # of float32, through two layers and a softmax


@pytest.mark.parametrize("name", ["Gemma 4", "DeepSeek-V3-shaped"])
def test_exports_say_what_the_trainer_says(name: str, tmp_path: Path) -> None:
    """Two kinds that no other test exports."""
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
    assert float(found.transformers["whole"]) > 100 * EXACT


def test_the_page_says_which_are_refused_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.md"
    assert program.main(["--quick", "--only", "Qwen 3.5", "--out", str(out)]) == 0
    page = out.read_text()
    assert page.strip() in capsys.readouterr().out
    assert "| Qwen 3.5 | no (1) |" in page
    assert "1. Qwen 3.5: Qwen3_5ForCausalLM has linear_attention" in page


def test_what_fails_in_one_form_is_a_note() -> None:
    one = measured.Measured("A", "", {"whole": 1e-6, "merged adapters": "no\nroom"}, "not started")
    page = program.page([one], with_vllm=False)
    assert "| A | yes | 1e-06 | no (1) | no (2) |" in page
    assert "1. A: no room\n2. A: not started" in page
