"""Layouts of slime: prompts, and rollouts that it trains on as if it had sampled them.

Checked with slime 0.3.1 (commit 624b824a898a): `slime.utils.data.Dataset` reads the prompts, and
`--load-debug-rollout-data FILE.pt` (`load_debug_rollout_data`) the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from tracegrad.events import Json, Outcome
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.layouts import ExportLayout, ReasonCounter
from tracegrad.transfer.token_rows import TokenRow
from tracegrad_integrations.exports.eligibility import (
    TASK_COLUMNS,
    eligible_rows,
    ground_truth,
    policy_exclusion,
    prompts,
    scored_rollouts,
    task_columns,
)


def _prompts(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for copy, turn in prompts(copies, left_out):
        yield {
            "prompt": turn.prompt,
            "label": ground_truth(copy.task),
            # With --tool-key slime wants a list in every row.
            "tools": turn.tools_text or "[]",
            "metadata": task_columns(copy),
        }


def _samples(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for copy, reward in scored_rollouts(copies, left_out):
        for row in eligible_rows(copy, policy_exclusion, left_out):
            yield _sample(copy, row, reward)


def _sample(copy: RolloutRecord, row: TokenRow, reward: float) -> Json:
    """`slime.utils.types.Sample`: the response is all that comes after the first prompt."""
    response = slice(row.prompt_tokens, None)
    return {
        "rollout_id": copy.rollout_id,
        "group_id": copy.task_id or copy.rollout_id,
        "tokens": row.token_ids.tolist(),
        "response_length": len(row.token_ids) - row.prompt_tokens,
        "loss_mask": row.mask[response],
        "rollout_log_probs": row.logprobs[response].tolist(),
        "weight_versions": [str(version) for version in row.versions],
        "reward": reward,
        "label": ground_truth(copy.task),
        "status": _status(copy, row),
        "metadata": {**task_columns(copy), "rollout_id": copy.rollout_id},
    }


def _status(copy: RolloutRecord, row: TokenRow) -> str:
    if copy.outcome == Outcome.BUDGET or row.turns[-1].finish_reason == "length":
        return "truncated"
    # slime trains on what failed too, and the agent's own failures are the policy's.
    return "failed" if copy.outcome == Outcome.AGENT_ERROR else "completed"


def save_samples(file: BinaryIO, rows: Iterator[Json]) -> None:
    """As slime's own `--save-debug-rollout-data`: all samples of one training step in one file.

    slime numbers groups, rollouts and samples where we have ids; rows of one rollout share its
    number, so that slime averages over the rollout and not over its rows.
    """
    import torch

    groups: dict[str, int] = {}
    rollouts: dict[str, int] = {}
    samples = []
    for index, row in enumerate(rows):
        group, rollout = row.pop("group_id"), row.pop("rollout_id")
        samples.append(
            {
                **row,
                "index": index,
                "group_index": groups.setdefault(group, len(groups)),
                "rollout_id": rollouts.setdefault(rollout, len(rollouts)),
            }
        )
    torch.save({"rollout_id": 0, "samples": samples}, file)


PROMPTS = ExportLayout(
    name="slime-prompts",
    reader="slime.utils.data.Dataset (--prompt-data)",
    columns={"prompt": "messages", "label": "text", "tools": "text", "metadata": TASK_COLUMNS},
    rows=_prompts,
)
SAMPLES = ExportLayout(
    name="slime-samples",
    reader="slime load_debug_rollout_data (--load-debug-rollout-data FILE.pt)",
    columns={
        "rollout_id": "text",
        "group_id": "text",
        "tokens": "ids",
        "response_length": "integer",
        "loss_mask": "mask",
        "rollout_log_probs": "logprobs",
        "weight_versions": "texts",
        "reward": "number",
        "label": "text",
        "status": "text",
        "metadata": {**TASK_COLUMNS, "rollout_id": "text"},
    },
    rows=_samples,
    text=False,
    files={"pt": save_samples},
)
