"""Layouts of verl: RLHFDataset, MultiTurnSFTDataset, and exact tokens for its SFT trainer.

Checked with verl 0.9.1. verl reads no file of sampled rollouts: what it trains on by policy
gradient it samples itself. Exact tokens reach its SFT trainer through a dataset class of ours
(module `verl_dataset`), which `data.custom_cls` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from tracegrad.events import Json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.layouts import ExportLayout, ReasonCounter
from tracegrad_integrations.exports.conversations import whole_conversations
from tracegrad_integrations.exports.eligibility import (
    TASK_COLUMNS,
    ground_truth,
    imitation_rows,
    prompts,
    task_columns,
)


def _rl(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for copy, turn in prompts(copies, left_out):
        yield {
            # verl chooses its reward function by this name, unless it is given one.
            "data_source": copy.agent or "tracegrad",
            "prompt": turn.prompt,
            "reward_model": {"style": "rule", "ground_truth": ground_truth(copy.task)},
            "extra_info": {"index": copy.task_id or copy.rollout_id, **task_columns(copy)},
        }


def _sft(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for conversation in whole_conversations(copies, left_out):
        # verl wants tools as columns, which cannot hold the schemas of different tools.
        if conversation.turns[-1].tools:
            left_out["turns: tools"] += len(conversation.turns)
        else:
            yield {"messages": conversation.messages}


RL = ExportLayout(
    name="verl-rl",
    reader="verl.utils.dataset.rl_dataset.RLHFDataset",
    columns={
        "data_source": "text",
        "prompt": "messages",
        "reward_model": {"style": "text", "ground_truth": "text"},
        "extra_info": {"index": "text", **TASK_COLUMNS},
    },
    rows=_rl,
)
SFT = ExportLayout(
    name="verl-sft",
    reader="verl.utils.dataset.multiturn_sft_dataset.MultiTurnSFTDataset",
    columns={"messages": "messages"},
    rows=_sft,
)
TOKENS = ExportLayout(
    name="verl-tokens",
    reader="tracegrad_integrations.exports.verl_dataset.TokenRows, by data.custom_cls",
    columns={"input_ids": "ids", "loss_mask": "mask"},
    rows=partial(imitation_rows, mask="loss_mask"),
    text=False,
)
