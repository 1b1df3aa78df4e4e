"""[resample]: what it needs of other tables, by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.trainer.step_samples import trainer_settings

LIVE = {"prompts": "live"}
OURS = {"resampled": "true"}
SCORED = {"commands": {"coin": "true"}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"in_flight": 64}, "rewards": SCORED}, r"set data.tags = \{resampled = "),
        ({"data": {"tags": OURS, "in_flight": 64}}, "nobody rewards those that are sampled again"),
        ({"data": {"tags": OURS}, "rewards": SCORED}, "set data.in_flight, or batches.stale"),
        (
            {
                "data": {"tags": OURS, "in_flight": 128},
                "rewards": SCORED,
                "batches": {"span_paths": ["*/writer"]},
            },
            r"batches.span_paths: prompts that are sampled again .* name agents in batches.agents",
        ),
    ],
)
def test_what_is_missing_is_named(tables: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_settings(tmp_path, resample=LIVE, **tables)


@pytest.mark.parametrize(
    "bound",
    [{"data": {"in_flight": 64}}, {"batches": {"stale": "wait"}}, {"data": {"synchronous": True}}],
)
def test_any_bound_on_what_is_opened_will_do(bound: dict[str, Any], tmp_path: Path) -> None:
    tables = {"rewards": SCORED, **bound, "data": {"tags": OURS, **bound.get("data", {})}}
    assert trainer_settings(tmp_path, resample=LIVE, **tables).resample.prompts == "live"
