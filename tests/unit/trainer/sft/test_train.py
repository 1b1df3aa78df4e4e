"""`trainer sft` as a whole: it learns, it can be killed, and any number of ranks learn the same."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.trainer.kill_runs import Runs, log_of, step_runs
from support.trainer.sft_samples import char_model, rollout, said, settings, store_at, teach
from tracegrad_trainer.engine.model import memory
from tracegrad_trainer.launch.torchrun import torchrun_command
from tracegrad_trainer.sft.config import SftSettings
from tracegrad_trainer.sft.train import SftTrainer

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return char_model(tmp_path_factory.mktemp("sft") / "model")


def fill(folder: Path) -> None:
    """Better rollouts say 11, worse ones 10; a teacher answers questions."""
    with store_at(folder) as store:
        for i in range(12):
            turns = [([5, 6, 7 + i % 3], [8, 9, 2]), ([1, 5], [10 + i % 2, 12, 2])]
            store.append(rollout(f"r{i}", turns, task=f"t{i % 3}", reward=float(i % 2)))
        teach(store, *({"messages": said(f"{i}?", "yes", "and?", "no")} for i in range(3)))


def written(asked: SftSettings) -> Path:
    asked.progress_file.parent.mkdir(parents=True, exist_ok=True)
    asked.progress_file.write_text("")
    file = asked.progress_file.with_suffix(".json")
    file.write_text(asked.model_dump_json())
    return file


def records(asked: SftSettings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in asked.progress_file.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with step_runs() as found:
        yield found


def run(runs: Runs, asked: SftSettings, *, ranks: int = 1) -> list[dict[str, Any]]:
    """One run to its end, in processes of its own -> what it reported."""
    file = written(asked)
    assert set(runs.run(file, program="sft", ranks=ranks)) == {0}, log_of(file)
    return records(asked)


def events(reported: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in reported if record["event"] == kind]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def test_a_model_that_does_not_fit_with_its_reference_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPO holds a second model: what is enough for `sft` is not for it."""
    fill(tmp_path)
    alone = settings(model, tmp_path)
    one_model = memory.estimate_memory(
        memory.meta_model(model), alone.trainer.fsdp, ranks=1, tokens=256, reference=False
    )
    needed = one_model.on_device + one_model.on_host
    monkeypatch.setattr(memory, "free_host_memory", lambda: needed)
    with ExitStack() as stack:
        SftTrainer(alone, stack, lambda: False)
    asked = settings(model, tmp_path, preset="dpo")
    with ExitStack() as stack, pytest.raises(ValueError, match="does not fit"):
        SftTrainer(asked, stack, lambda: False)


def test_it_learns_what_was_said_and_writes_a_model_that_transformers_loads(
    tmp_path: Path, model: Path, runs: Runs
) -> None:
    fill(tmp_path)
    out = tmp_path / "learnt"
    asked = settings(model, tmp_path, epochs=4, held_out=0.2, tokens_per_step=120, out=out)
    reported = run(runs, asked)
    held_out = events(reported, "held_out")
    assert [record["epoch"] for record in held_out] == [0, 1, 2, 3, 4]
    assert held_out[-1]["loss"] < 0.5 * held_out[0]["loss"]
    assert held_out[-1]["accuracy"] > held_out[0]["accuracy"] + 0.3
    assert reported[-1] == {"event": "done", "model": str(out)}
    kept = [json.loads(line) for line in (Path(reported[0]["run"]) / "metrics.jsonl").open()]
    assert [r for r in reported if r["event"] in ("step", "held_out")] == kept
    loaded = AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([[5, 6, 7]])
    assert loaded(prompt).logits[0, -1].argmax() == 8
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, model: Path, runs: Runs
) -> None:
    fill(tmp_path)
    common: dict[str, Any] = {"epochs": 2, "tokens_per_step": 60, "save_every": 1, "held_out": 0.2}
    whole = run(runs, settings(model, tmp_path, out=tmp_path / "whole", **common))
    folder = Path(whole[0]["run"])
    steps = events(whole, "step")
    # As a kill in the middle leaves it: the newest checkpoints and the end are not there yet.
    kept = sorted((folder / "checkpoints").glob("step-*"))
    assert len(kept) >= 2
    for late in kept[1:]:
        subprocess.run(["rm", "-r", str(late)], check=True)
    again = run(runs, settings(model, tmp_path, out=tmp_path / "again", **common))
    resumed = int(kept[0].name[5:])
    assert events(again, "resumed") == [{"event": "resumed", "step": resumed}]
    deterministic = [{k: v for k, v in s.items() if k != "tokens_per_second"} for s in steps]
    assert [
        {k: v for k, v in s.items() if k != "tokens_per_second"} for s in events(again, "step")
    ] == deterministic[resumed:]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [r["step"] for r in metrics if r["event"] == "step"] == [s["step"] for s in steps]
    before, after = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert all(torch.equal(before[name], after[name]) for name in before)


# Where policy and reference are the same model.
LOSS_AT_REFERENCE = {"dpo": 0.6931472, "kto": 0.5}


@pytest.mark.parametrize("preset", ["sft", "dpo", "kto"])
def test_two_ranks_learn_what_one_does(
    tmp_path: Path, model: Path, runs: Runs, preset: str
) -> None:
    losses = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        fill(folder)
        small = {"tokens_per_micro_batch": 64}
        asked = settings(model, folder, preset=preset, held_out=0.34, epochs=2, batches=small)
        reported = run(runs, asked, ranks=ranks)
        losses.append([record["loss"] for record in reported if "loss" in record])
        if (start := LOSS_AT_REFERENCE.get(preset)) is not None:
            assert events(reported, "held_out")[0]["loss"] == pytest.approx(start, rel=1e-5)
            assert events(reported, "step")[0]["loss"] == pytest.approx(start, rel=1e-5)
            assert events(reported, "held_out")[-1]["accuracy"] == 1.0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_where_there_is_nothing_the_run_says_so(tmp_path: Path, model: Path) -> None:
    """Two ranks, as `trainer sft` starts them: by torch's launcher."""
    with store_at(tmp_path):
        pass
    asked = settings(model, tmp_path, ranks=2)
    command = torchrun_command(2, "tracegrad_trainer.sft.train", str(written(asked)))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    [record] = records(asked)
    assert record["event"] == "failed", done.stderr
    assert record["error"].startswith("no rollouts match")
    assert done.returncode == 1
