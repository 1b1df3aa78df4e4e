"""examples/recipes/qwen3-0.6b.toml: planned for one GPU of 24 GB without weights or a network, and
the figures of docs/recipes.md are those of the plan."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from typer.testing import CliRunner

from support.trainer.tiny_model import tiny_tokenizer
from tracegrad_trainer.cli.app import app
from tracegrad_trainer.engine.model.memory import meta_model
from tracegrad_trainer.launch.model_outline import write_outline

ROOT = Path(__file__).resolve().parents[4]
RECIPE = ROOT / "examples" / "recipes" / "qwen3-0.6b.toml"
GIB = 2**30
# What the model's config.json on the Hub says of its shape.
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this shape, whose weights have headers and no numbers."""
    folder = tmp_path_factory.mktemp("model") / "qwen3-0.6b"
    tiny_tokenizer().save_pretrained(folder)
    config = Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights: Any = AutoModelForCausalLM.from_config(config)
    write_outline(folder / "model.safetensors", header(weights))
    return folder


def header(weights: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    end = 0
    for name, one in weights.named_parameters():  # a tied head once, as on the Hub
        begin, end = end, end + 2 * math.prod(one.shape)
        found[name] = {"dtype": "BF16", "shape": list(one.shape), "data_offsets": [begin, end]}
    return found


@pytest.fixture(scope="module")
def plan(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = ["--model", str(model), "--state-dir", str(tmp_path_factory.mktemp("state"))]
    words = ["serve", "--config", str(RECIPE), "--dry-run", "--gpus", "1x24GiB", "--json"]
    ended = CliRunner().invoke(app, [*words, *where])
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_it_names_the_model_as_the_hub_does() -> None:
    assert tomllib.loads(RECIPE.read_text(encoding="utf-8"))["model"] == "Qwen/Qwen3-0.6B"


def test_it_fits_one_gpu_that_both_share(plan: dict[str, Any]) -> None:
    placement = plan["placement"]
    assert placement["shared"] is True


def test_the_page_says_how_much_disk_it_takes(model: Path, plan: dict[str, Any]) -> None:
    parameters = sum(each.numel() for each in meta_model(model).parameters())
    checkpoint = 3 * 4 * parameters  # weights and two moments, in float32
    version = 2 * parameters  # as they are pushed, in bfloat16
    kept = plan["settings"]["promotion"]["keep"]
    checkpoints = max(kept, plan["settings"]["checkpoint"]["keep"])
    disk = (checkpoints + 1) * checkpoint + (kept + 1) * version  # one of each is being written
    page = " ".join((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split())
    assert f"{math.ceil(disk / GIB)} GiB of disk for its state folder" in page
    assert f"is {checkpoint / GIB:.1f} GiB (12 bytes a parameter)" in page
    assert f"may go to are {version / GIB:.1f} GiB (`versions/`)" in page
    assert kept == checkpoints == 3, "as the page counts them"
    assert f"takes {(checkpoint + version) / GIB:.1f} GiB more" in page


def test_the_page_shows_what_the_plan_prints(model: Path, tmp_path: Path) -> None:
    where = ["--model", str(model), "--state-dir", str(tmp_path)]
    words = ["serve", "--config", str(RECIPE), "--dry-run", "--gpus", "1x24GiB"]
    ended = CliRunner().invoke(app, [*words, *where], env={"COLUMNS": "300"})
    assert ended.exit_code == 0, ended.output
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    shown, *_ = re.findall(r"```text\n(placement: .*?)```", page, re.S)
    printed = {" ".join(line.split()) for line in ended.stdout.splitlines()}
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert [line for line in lines if line not in printed and line != "…"] == []
