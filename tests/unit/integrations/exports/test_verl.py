"""Our files, read by verl's own dataset classes, hold what the store holds.

verl is installed on first use, in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from support.cli_agents.recipes import CACHE
from support.readers import __file__ as readers
from support.transfer.template_store import NEWLINE, TOKENIZER, fill
from tracegrad.runner.agent_install import install_agent
from tracegrad.runner.recipe import Recipe
from tracegrad.store import Store
from tracegrad.transfer import ExportLayout, parquet
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad_integrations.exports import verl, verl_dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READERS = Path(readers).parent
VERL = Recipe(
    name="verl",
    version="0.9.1",
    dialect="chat",
    installer="pip",
    lock=READERS / "verl.txt",
    packages=("verl==0.9.1",),
    command=("python",),
)
CUSTOM = {"path": "pkg://tracegrad_integrations.exports.verl_dataset", "name": "TokenRows"}


def read(
    kind: str, layout: ExportLayout, store: Store, folder: Path, **settings: Any
) -> tuple[Any, dict[str, int]]:
    export = RolloutExport(store=store)
    path = folder / "rows.parquet"
    with path.open("wb") as file:
        parquet.write(file, export.layout(layout), layout.columns)
    TOKENIZER.save_pretrained(folder / "tokenizer")
    # What verl shares with the project, and the project itself, which is not installed there.
    shared = [sysconfig.get_path("purelib"), str(Path(verl_dataset.__file__).parents[2])]
    done = subprocess.run(
        [
            *(install_agent(VERL, CACHE).folder / "bin" / "python", READERS / "read_with_verl.py"),
            *(kind, path, folder / "tokenizer"),
            *(f"{name}={json.dumps(value)}" for name, value in settings.items()),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(shared),
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), dict(export.counts.left_out)


@pytest.fixture
def scene(store: Store) -> Store:
    fill(store)
    return store


def wholes(store: Store) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and completion of each turn."""
    return {
        turn.turn_id: (turn.prompt_token_ids.tolist(), turn.completion_token_ids.tolist())
        for row in store.rollouts()
        for turn in store.rollout_turns(row.rollout_id)
    }


def test_prompts_for_policy_gradient(scene: Store, tmp_path: Path) -> None:
    batch, left_out = read(
        "RLHFDataset", verl.RL, scene, tmp_path,
        cache_dir=str(tmp_path), max_prompt_length=1024, filter_overlong_prompts_workers=None,
    )  # fmt: skip
    prompts = [[(m["role"], m["content"]) for m in prompt] for prompt in batch["raw_prompt"]]
    assert sorted(prompts) == sorted(
        [
            [("user", "Hello")],
            [("user", "How many lamps?")],
            [("system", "Short."), ("user", "2+2?")],
            [("user", "1"), ("assistant", "one"), ("user", "2")],
        ]
    )
    by_task = dict(
        zip([i["task_id"] for i in batch["extra_info"]], batch["reward_model"], strict=True)
    )
    assert by_task["sum"] == {"style": "rule", "ground_truth": "4"}
    assert by_task["stock"] == {"style": "rule", "ground_truth": "count lamps"}
    assert set(batch["data_source"]) == {"shop"}
    assert batch["index"] == [info["index"] for info in batch["extra_info"]]
    assert left_out == {"rollouts: same_prompt": 6}


def test_conversations_for_sft(scene: Store, tmp_path: Path) -> None:
    batch, left_out = read(
        "MultiTurnSFTDataset", verl.SFT, scene, tmp_path, pad_mode="no_padding", max_length=1024
    )
    known = wholes(scene)
    learned = {}
    for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
        targets = tuple(i for i, one in zip(ids, mask, strict=True) if one)
        learned[tuple(ids)] = targets
    # verl learns the line feed after a reply, too: the template renders it with the message.
    expected = {}
    for end in ["a1.0", "a2.0", "a3.0", "a4.0", "b1.0", "b2.0", "b3.0"]:
        prompt, reply = known[end]
        expected[(*prompt, *reply, NEWLINE)] = (*reply, NEWLINE)
    prompt, reply = known["d1.01"]
    both = (*known["d1.0"][1], NEWLINE, *reply, NEWLINE)
    expected[(*prompt, *reply, NEWLINE)] = both
    assert learned == expected
    assert left_out == {"turns: tools": 2, "turns: shared_reply": 1, "turns: foreign_reply": 1}


@pytest.mark.parametrize("pad_mode", ["no_padding", "right"])
def test_exact_tokens_for_sft(scene: Store, tmp_path: Path, pad_mode: str) -> None:
    batch, left_out = read(
        "custom", verl.TOKENS, scene, tmp_path,
        custom_cls=CUSTOM, pad_mode=pad_mode, max_length=512,
    )  # fmt: skip
    known = wholes(scene)
    learned = sorted(
        [i for i, one in zip(ids, mask, strict=True) if one]
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)
    )
    alone = ["a1.0", "a2.0", "a3.0", "a4.0", "b1.0", "b2.0", "b3.0", "d2.0", "d1.002"]
    replies = {name: reply for name, (_, reply) in known.items()}
    assert learned == sorted(
        [
            *(replies[n] for n in alone),
            replies["c1.0"] + replies["c1.01"],
            replies["d1.0"] + replies["d1.01"],
        ]
    )
    assert left_out == {}
    for index, ids in enumerate(batch["input_ids"]):
        length = len(ids) if pad_mode == "no_padding" else sum(batch["attention_mask"][index])
        assert ids[:length] in [prompt + reply for prompt, reply in known.values()]
        assert batch["position_ids"][index][:length] == list(range(length))
        assert set(ids[length:]) <= {TOKENIZER.pad_token_id}
