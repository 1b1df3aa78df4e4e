"""`trainer serve --dry-run` with a name on the Hub: a plan fetches no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from support.chat.fake_hub import FakeHub, put_in_cache
from support.trainer.prepared_run import save_smallest_model
from tracegrad_trainer.cli.app import app

NAME, COMMIT = "acme/tiny", "a" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """In several files, each of more than a header takes."""
    folder = save_smallest_model(tmp_path / "model")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    loaded.resize_token_embeddings(8_000, mean_resizing=False)
    (folder / "model.safetensors").unlink()
    loaded.save_pretrained(folder, max_shard_size="300KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    served = FakeHub(NAME, model, COMMIT)
    with served.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served
        close_session()


def planned(model: object, folder: Path) -> dict[str, Any]:
    given = ["--model", str(model), "--state-dir", str(folder / "state"), "--gpus", "2x24GiB"]
    ended = CliRunner().invoke(app, ["serve", "--dry-run", "--json", *given])
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_plan_is_that_of_the_folder_and_fetches_headers_alone(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    of_folder = planned(model, tmp_path)
    of_name = planned(NAME, tmp_path)
    assert of_name["placement"]["gpus"] == of_folder["placement"]["gpus"]
    assert of_name["settings"]["model"] == f"{NAME}@{COMMIT}"
    assert of_name["settings"]["vllm"]["model"] == f"{NAME}@{COMMIT}"
    weights = [file for file in model.iterdir() if file.suffix == ".safetensors"]
    all_bytes = sum(file.stat().st_size for file in weights)
    assert 0 < sum(hub.sent[file.name] for file in weights) < all_bytes / 2
    assert not [*(tmp_path / "hub").rglob("*.safetensors")], "the cache has no half a model"


def test_what_is_in_the_cache_is_planned_from_there(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    snapshot = put_in_cache(tmp_path / "hub", NAME, model, COMMIT)
    assert planned(NAME, tmp_path)["settings"]["model"] == str(snapshot)
    assert not [name for name in hub.sent if name.endswith(".safetensors")]


def test_weights_of_other_names_are_fetched(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    found = planned(NAME, tmp_path)
    assert Path(found["settings"]["model"]).name == COMMIT
