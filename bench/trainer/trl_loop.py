"""TRL's GRPO trainer on rollouts that are there: its step and its loss, without generation.

A sequence a rollout is what its own loop makes of tool calls: the first prompt, and everything
behind it as the completion, with a mask that leaves out what was said between. A row a call is
what calls give as they are captured.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from bench.trainer.plain import sequence
from bench.trainer.rollouts import Attempt
from bench.trainer.work import (
    MAX_NORM,
    OBJECTIVE,
    TRL_CALL,
    TRL_ROLLOUT,
    Peer,
    Work,
    adamw,
)


class TrlRow(NamedTuple):
    prompt: Tensor  # i64[P]
    completion: Tensor  # i64[C]
    trained: Tensor  # bool[C]
    advantage: float


class Trl(Peer):
    def __init__(self, work: Work, *, by_call: bool) -> None:
        self.name = TRL_CALL if by_call else TRL_ROLLOUT
        self.rows = [
            row
            for attempt in work.attempts
            for row in (_calls if by_call else _whole)(attempt, work.advantages[attempt.rollout_id])
        ]
        self.size = work.rows
        self.sampled = work.sampled
        self.trainer = _trainer(work.folder, -(-len(self.rows) // work.rows))
        self.model = self.trainer.model
        self.optimizer = adamw(self.model)

    def step(self) -> float:
        total = 0.0
        self.optimizer.zero_grad()
        for start in range(0, len(self.rows), self.size):
            inputs = _padded(self.rows[start : start + self.size])
            # Of the whole step: the loss is a mean over its tokens.
            inputs["num_items_in_batch"] = torch.tensor(self.sampled)
            total += float(self.trainer.training_step(self.model, inputs, None))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return total


def _whole(attempt: Attempt, advantage: float) -> list[TrlRow]:
    ids, sampled = sequence(attempt)
    start = len(attempt.turns[0].prompt_token_ids)
    return [TrlRow(ids[:start], ids[start:], sampled[start:], advantage)]


def _calls(attempt: Attempt, advantage: float) -> list[TrlRow]:
    rows = []
    for turn in attempt.turns:
        prompt = torch.tensor(turn.prompt_token_ids)
        completion = torch.tensor(turn.completion_token_ids)
        trained = torch.ones(len(completion), dtype=torch.bool)
        rows.append(TrlRow(prompt, completion, trained, advantage))
    return rows


def _padded(rows: Sequence[TrlRow]) -> dict[str, Tensor]:
    """Prompts on the left, completions on the right, as the trainer does it."""

    def pad(values: Sequence[Tensor], side: str) -> Tensor:
        return pad_sequence(list(values), batch_first=True, padding_side=side).long()

    return {
        "prompt_ids": pad([row.prompt for row in rows], "left"),
        "prompt_mask": pad([torch.ones_like(row.prompt) for row in rows], "left"),
        "completion_ids": pad([row.completion for row in rows], "right"),
        "completion_mask": pad([torch.ones_like(row.completion) for row in rows], "right"),
        "tool_mask": pad([row.trained for row in rows], "right"),
        "advantages": torch.tensor([row.advantage for row in rows]),
    }


def _trainer(folder: Path, forwards: int) -> Any:
    """The trainer, set so that an optimizer step has so many forwards."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=forwards,
        loss_type="dapo",
        beta=0.0,
        epsilon=OBJECTIVE.clip_low,
        epsilon_high=OBJECTIVE.clip_high,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]),
        processing_class=_tokenizer(),
    )
    # What it would generate and score is there.
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.current_gradient_accumulation_steps = forwards
    return trainer


def _tokenizer() -> PreTrainedTokenizerFast:
    """It asks for one."""
    tokenizers: Any = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({"[PAD]": 0, "[EOS]": 1}, unk_token="[EOS]")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="[PAD]", eos_token="[EOS]"
    )
