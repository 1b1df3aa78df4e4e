"""Rows of `export --layout verl-tokens` for verl's SFT trainer: sampled tokens, as sampled.

    data.custom_cls.path=pkg://tracegrad_integrations.exports.verl_dataset
    data.custom_cls.name=TokenRows

verl's own dataset renders messages again, and learns every assistant message. It runs in verl's
processes and imports nothing of tracegrad: the file may be copied to where verl runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset


class TokenRows(Dataset[dict[str, torch.Tensor]]):
    """Each row as `input_ids`, `position_ids` and `loss_mask` (1 on targets), all int64[T].

    As verl's `MultiTurnSFTDataset`: `pad_mode` "right" adds `attention_mask` and pads to
    `max_length`; "no_padding" leaves rows as they are. A row over `max_length` is an error, or cut
    on the right where `truncation` is "right": cut on the left, a row has no prompt.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        import pyarrow.parquet

        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        tables = [pyarrow.parquet.read_table(file, columns=_COLUMNS) for file in files]
        table = pyarrow.concat_tables(tables).combine_chunks()
        self._table = table if max_samples < 0 else table.slice(0, max_samples)
        self._pad_mode = config.get("pad_mode", "right")
        self._max_length = config.get("max_length", 1024)
        self._truncation = config.get("truncation", "error")
        pad = getattr(tokenizer, "pad_token_id", None)
        self._pad_id = 0 if pad is None else pad
        if self._pad_mode not in ("right", "no_padding"):
            raise ValueError(f"data.pad_mode: {self._pad_mode!r}; write right or no_padding")
        if self._truncation not in ("right", "error"):
            raise ValueError(f"data.truncation: {self._truncation!r}; write right or error")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        columns = {name: self._table[name][index].values.to_numpy() for name in _COLUMNS}
        tokens = len(columns["input_ids"])
        if tokens > self._max_length and self._truncation == "error":
            raise ValueError(
                f"row {index} has {tokens} tokens, data.max_length is {self._max_length}; "
                "raise it, or write data.truncation=right"
            )
        ids, mask = (
            torch.tensor(columns[name][: self._max_length], dtype=torch.int64) for name in _COLUMNS
        )
        row = {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "loss_mask": mask,
        }
        return row if self._pad_mode == "no_padding" else self._padded(row)

    def _padded(self, row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        more = (0, self._max_length - len(row["input_ids"]))
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        return {
            name: torch.nn.functional.pad(
                values, more, value=self._pad_id if name == "input_ids" else 0
            )
            for name, values in row.items()
        }


_COLUMNS = ["input_ids", "loss_mask"]
