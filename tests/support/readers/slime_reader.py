"""How slime reads prompts and saved rollouts, said again in our words.

slime is not on PyPI, and its package imports SGLang and Megatron. Its reading code, version 0.3.1,
commit 624b824a898ab0ec1fcb4d373004c7f3852bf515:

- `slime/utils/data.py`: `read_file` and `Dataset` (prompts);
- `slime/observability/rollout_data_utils.py`: `load_debug_rollout_data`;
- `slime/utils/types.py`: `Sample.from_dict`, `Sample._validate_response_metadata_lengths`;
- `slime/ray/rollout.py`: `_convert_samples_to_train_data`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

STATUSES = {"pending", "completed", "truncated", "aborted", "failed"}
# Those of `Sample` that its training data are made of, and what a file may leave out.
FIELDS: dict[str, Any] = {
    "group_index": None,
    "index": None,
    "rollout_id": None,
    "tokens": [],
    "response_length": 0,
    "label": None,
    "reward": None,
    "loss_mask": None,
    "weight_versions": [],
    "rollout_log_probs": None,
    "status": None,  # no default: `from_dict` asks for it
    "metadata": {},
}


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """As with --input-key prompt --label-key label --tool-key tools --metadata-key metadata."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    else:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = [row for batch in batches for row in batch.to_pylist()]
    samples = []
    for row in rows:
        metadata = row.get("metadata") or {}
        tools = row["tools"]
        tools = json.loads(tools) if isinstance(tools, str) else tools
        assert isinstance(tools, list)
        metadata["tools"] = tools
        samples.append({"prompt": row["prompt"], "label": row["label"], "metadata": metadata})
    return samples


def load_rollouts(path: Path) -> list[dict[str, Any]]:
    """Samples, their lengths checked."""
    samples = []
    for stored in torch.load(path, weights_only=False)["samples"]:
        assert stored["status"] in STATUSES
        assert stored.keys() <= FIELDS.keys(), (
            "slime would set it as an attribute that nobody reads"
        )
        sample = FIELDS | stored
        length = sample["response_length"]
        assert len(sample["loss_mask"]) == length
        assert len(sample["rollout_log_probs"]) == length
        samples.append(sample)
    return samples


def training_data(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Before rewards are normalised."""
    totals: dict[int, int] = {}
    for sample in samples:
        totals[sample["rollout_id"]] = totals.get(sample["rollout_id"], 0) + sum(
            sample["loss_mask"]
        )
    return {
        "tokens": [sample["tokens"] for sample in samples],
        "response_lengths": [sample["response_length"] for sample in samples],
        "raw_reward": [float(sample["reward"]) for sample in samples],
        "truncated": [int(sample["status"] == "truncated") for sample in samples],
        "loss_masks": [sample["loss_mask"] for sample in samples],
        "rollout_mask_sums": [totals[sample["rollout_id"]] for sample in samples],
        "rollout_log_probs": [sample["rollout_log_probs"] for sample in samples],
    }
