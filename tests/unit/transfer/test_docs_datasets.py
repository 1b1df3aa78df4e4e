"""The lines of docs/transfer.md for Hugging Face's datasets, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from typer.testing import CliRunner

from support.transfer.template_store import CHAT, answer, fill, turn
from tracegrad.cli.app import app
from tracegrad.store import Store

PAGE = (Path(__file__).parents[3] / "docs" / "transfer.md").read_text()
INT32, FLOAT32 = datasets.List(datasets.Value("int32")), datasets.List(datasets.Value("float32"))


def test_turns_as_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    with Store.open("sqlite:///tracegrad.db") as store:
        fill(store)
        names = {"planned": "planner", "written": "writer", "written-greedily": "writer"}
        for name, agent in names.items():
            why = "greedy" if name.endswith("greedily") else None
            one = turn(name, "team", CHAT, answer(name), agent_name=agent, untrainable=why)
            store.append([one])
        turns = {
            one.turn_id: one
            for row in store.rollouts()
            for one in store.rollout_turns(row.rollout_id)
        }
    done = CliRunner().invoke(
        app,
        ["export", "--turns", "-o", "turns.parquet"],
        env={"TRACEGRAD_STORE": "sqlite:///tracegrad.db"},
    )
    assert done.exit_code == 0, done.output
    scope: dict[str, Any] = {}
    lines = [b for b in re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL) if "turns" in b]
    exec("\n".join(lines), scope)
    from_file, direct = scope["turns"], scope["direct"]
    assert from_file.features == direct.features
    assert from_file.to_list() == direct.to_list()
    assert {row["turn_id"]: row["agent_name"] for row in direct if row["agent_name"]} == names
    written = turns["written"]
    assert scope["rows"].to_list() == [
        {
            "input_ids": (written.prompt_token_ids + written.completion_token_ids).tolist(),
            "assistant_masks": [0] * len(written.prompt_token_ids)
            + [1] * len(written.completion_token_ids),
        }
    ]
    assert direct.features["prompt_token_ids"] == INT32
    assert direct.features["completion_logprobs"] == FLOAT32
    assert {row["turn_id"]: row["completion_logprobs"] for row in direct} == {
        turn_id: one.completion_logprobs.tolist() for turn_id, one in turns.items()
    }
