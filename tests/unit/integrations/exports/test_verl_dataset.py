"""The dataset class that brings exact tokens into verl, without verl."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tracegrad_integrations.exports.verl_dataset import TokenRows

ROWS = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0], "other": "x"},
    {"input_ids": [9, 10], "loss_mask": [0, 1], "other": "y"},
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return str(path)


def rows(file: str, **settings: Any) -> list[dict[str, list[int]]]:
    dataset = TokenRows(file, SimpleNamespace(pad_token_id=1), {"max_length": 4, **settings})
    return [
        {name: values.tolist() for name, values in dataset[n].items()} for n in range(len(dataset))
    ]


def test_rows_are_padded_on_the_right(file: str) -> None:
    assert rows(file)[1] == {
        "input_ids": [9, 10, 1, 1],
        "position_ids": [0, 1, 0, 0],
        "loss_mask": [0, 1, 0, 0],
        "attention_mask": [1, 1, 0, 0],
    }


def test_rows_stay_as_they_are(file: str) -> None:
    assert rows(file, pad_mode="no_padding") == [
        {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 2, 3], "loss_mask": [0, 1, 1, 0]},
        {"input_ids": [9, 10], "position_ids": [0, 1], "loss_mask": [0, 1]},
    ]


def test_rows_are_cut_only_when_that_is_asked_for(file: str) -> None:
    with pytest.raises(ValueError, match=r"row 0 has 4 tokens, data\.max_length is 3; raise it"):
        rows(file, max_length=3)
    cut = rows(file, max_length=3, truncation="right", pad_mode="no_padding")
    assert cut[0]["input_ids"] == [5, 6, 7]
    assert cut[0]["loss_mask"] == [0, 1, 1]


def test_files_follow_each_other_and_samples_are_bounded(file: str) -> None:
    dataset = TokenRows([file, file], None, {"max_length": 4}, max_samples=3)
    assert len(dataset) == 3
    assert dataset[2]["input_ids"].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "settings", [{"pad_mode": "left"}, {"truncation": "left"}], ids=["pad", "truncation"]
)
def test_settings_that_it_does_not_have_are_named(file: str, settings: dict[str, str]) -> None:
    [(name, value)] = settings.items()
    with pytest.raises(ValueError, match=rf"data\.{name}: '{value}'; write"):
        rows(file, **settings)
