"""Our files, read by TRL's own trainers, hold what the store holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
)

from support.trainer.tiny_model import tiny_model
from support.transfer.template_store import NEWLINE, TOKENIZER, fill
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.transfer import ExportLayout, jsonl, parquet
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad_integrations.exports import trl as layouts

# A layout's file as `datasets` loads it, and what has no row in it.
Written = Callable[[ExportLayout], tuple[Any, dict[str, int]]]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


@pytest.fixture
def scene(store: Store) -> Store:
    fill(store)
    return store


@pytest.fixture(params=["parquet", "jsonl"])
def written(request: pytest.FixtureRequest, scene: Store, tmp_path: Path) -> Written:
    def load(layout: ExportLayout) -> tuple[Any, dict[str, int]]:
        path = tmp_path / f"{layout.name}.{request.param}"
        export = RolloutExport(store=scene)
        rows = export.layout(layout)
        with path.open("wb") as file:
            if request.param == "parquet":
                parquet.write(file, rows, layout.columns)
            else:
                file.writelines(map(jsonl.line_of, rows))
        kind = "json" if request.param == "jsonl" else "parquet"
        loaded = datasets.load_dataset(kind, data_files=str(path), split="train")
        assert len(loaded) == export.counts.written["row"]
        return loaded, export.counts.left_out

    return load


def arguments(kind: type[Any], folder: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(folder), use_cpu=True, report_to=[], max_length=None, bf16=False, **more
    )


def turns(store: Store) -> dict[str, Turn]:
    return {t.turn_id: t for row in store.rollouts() for t in store.rollout_turns(row.rollout_id)}


def targets(row: Any) -> list[int]:
    return [label for label in row["labels"] if label != -100]


def test_exact_tokens_are_learned_once_and_nothing_else_is(
    written: Written, scene: Store, tmp_path: Path
) -> None:
    dataset, left_out = written(layouts.TOKENS)
    trainer = SFTTrainer(
        tiny_model(len(TOKENIZER)),
        args=arguments(SFTConfig, tmp_path),
        train_dataset=dataset,
        processing_class=TOKENIZER,
    )
    learned: Counter[tuple[int, ...]] = Counter()
    for row in trainer.train_dataset:
        pairs = zip(row["labels"], row["input_ids"], strict=True)
        assert all(label in (-100, token) for label, token in pairs)
        learned[tuple(targets(row))] += 1
    known = turns(scene)
    replies = {name: tuple(turn.completion_token_ids) for name, turn in known.items()}
    alone = ["a1.0", "a2.0", "a3.0", "a4.0", "b1.0", "b2.0", "b3.0", "d2.0", "d1.002"]
    assert learned == Counter(
        [
            *(replies[n] for n in alone),
            replies["c1.0"] + replies["c1.01"],
            replies["d1.0"] + replies["d1.01"],
        ]
    )
    assert left_out == {}
    wholes = {tuple(t.prompt_token_ids + t.completion_token_ids) for t in known.values()}
    assert {tuple(row["input_ids"]) for row in trainer.train_dataset} <= wholes
    # The collator keeps the mask.
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["labels"] != -100).sum() > 0
    assert bool(((batch["labels"] == -100) | (batch["labels"] == batch["input_ids"])).all())


def test_conversations_are_rendered_as_they_were(
    written: Written, scene: Store, tmp_path: Path
) -> None:
    dataset, left_out = written(layouts.SFT)
    trainer = SFTTrainer(
        tiny_model(len(TOKENIZER)),
        args=arguments(SFTConfig, tmp_path),
        train_dataset=dataset,
        processing_class=TOKENIZER,
    )
    rendered = sorted(map(tuple, trainer.train_dataset["input_ids"]))
    known = turns(scene)
    ends = ["a1.0", "a2.0", "a3.0", "a4.0", "b1.0", "b2.0", "b3.0", "c1.01", "d1.01"]
    assert rendered == sorted(
        (*known[n].prompt_token_ids, *known[n].completion_token_ids, NEWLINE) for n in ends
    )
    # The branch would learn its first reply again; what an agent brings along was not sampled.
    assert left_out == {"turns: shared_reply": 1, "turns: foreign_reply": 1}


def test_each_reply_is_learned_from_its_own_prompt(
    written: Written, scene: Store, tmp_path: Path
) -> None:
    dataset, left_out = written(layouts.PROMPT_COMPLETION)
    trainer = SFTTrainer(
        tiny_model(len(TOKENIZER)),
        args=arguments(SFTConfig, tmp_path, completion_only_loss=True),
        train_dataset=dataset,
        processing_class=TOKENIZER,
    )
    learned = sorted(tuple(targets(row)) for row in trainer.train_dataset)
    replies = [(*turn.completion_token_ids, NEWLINE) for turn in turns(scene).values()]
    assert learned == sorted(replies)
    assert left_out == {}


def test_preferences_are_pairs_of_equal_prompts(
    written: Written, scene: Store, tmp_path: Path
) -> None:
    dataset, left_out = written(layouts.PREFERENCE)
    trainer = DPOTrainer(
        tiny_model(len(TOKENIZER)),
        ref_model=tiny_model(len(TOKENIZER)),
        args=arguments(DPOConfig, tmp_path),
        train_dataset=dataset,
        processing_class=TOKENIZER,
    )
    known = turns(scene)
    [row] = list(trainer.train_dataset)
    assert row["prompt_ids"] == known["a1.0"].prompt_token_ids.tolist()
    assert row["chosen_ids"] == [*known["a1.0"].completion_token_ids, NEWLINE]
    assert row["rejected_ids"] == [*known["a2.0"].completion_token_ids, NEWLINE]
    assert (dataset[0]["chosen_reward"], dataset[0]["rejected_reward"]) == (1.0, 0.0)
    assert left_out == {
        "rollouts: infra_error": 1,
        "rollouts: no_reward": 1,
        "rollouts: open": 1,
        "rollouts: several_turns": 2,
        "rollouts: no_other_reward": 3,  # a3 and a4 are equal, d2 is alone
    }


def test_answers_are_good_or_bad_beside_the_others(
    written: Written, scene: Store, tmp_path: Path
) -> None:
    dataset, left_out = written(layouts.KTO)
    trainer = KTOTrainer(
        tiny_model(len(TOKENIZER)),
        ref_model=tiny_model(len(TOKENIZER)),
        args=arguments(KTOConfig, tmp_path, per_device_train_batch_size=2),
        train_dataset=dataset,
        processing_class=TOKENIZER,
    )
    known = turns(scene)
    found = [(r["prompt_ids"], r["completion_ids"], r["label"]) for r in trainer.train_dataset]
    assert found == [
        (
            known[name].prompt_token_ids.tolist(),
            [*known[name].completion_token_ids, NEWLINE],
            good,
        )
        for name, good in (("a1.0", True), ("a2.0", False))
    ]
    assert left_out["rollouts: mean_reward"] == 3


def test_prompts_and_tasks_reach_the_reward_function(written: Written, tmp_path: Path) -> None:
    dataset, left_out = written(layouts.GRPO)
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, task: Any, task_id: Any, **_: Any) -> list[float]:
        for prompt, one, name in zip(prompts, task, task_id, strict=True):
            seen[name] = ([message["content"] for message in prompt], one)
        return [float(len(completion)) for completion in completions]

    settings = {"num_generations": 2, "max_completion_length": 2, "max_steps": 2}
    trainer = GRPOTrainer(
        tiny_model(len(TOKENIZER)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False, logging_steps=10,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, **settings,
        ),
        train_dataset=dataset,
        processing_class=TOKENIZER,
    )  # fmt: skip
    trainer.train()
    assert seen == {
        "sum": (["Short.", "2+2?"], '{"text":"2+2?","answer":4}'),
        "stock": (["How many lamps?"], '"count lamps"'),
        "chat": (["Hello"], None),
        None: (["1", "one", "2"], None),
    }
    assert left_out == {"rollouts: same_prompt": 6}
