"""The page on objectives names what there is, and its example runs."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from support.trainer.loss_tokens import tokens
from tracegrad_trainer.losses import PRESETS, ObjectiveSettings, compute_loss, preset
from tracegrad_trainer.losses.diagnostics import (
    diagnostic_maxima,
    diagnostic_sums,
    summarise_diagnostics,
)
from tracegrad_trainer.losses.part_names import PARTS

PAGE = (Path(__file__).parents[4] / "docs" / "objectives.md").read_text()


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading, by the name in their first cell."""
    section = PAGE.split(f"{heading}\n", 1)[1]
    lines = re.search(r"(\|.*\n)+", section)
    assert lines is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.mark.parametrize(
    ("kind", "heading"),
    [
        ("ratio", "### Ratios: `ratio`"),
        ("surrogate", "### Surrogates: `surrogate`"),
        ("correction", "### Mismatch corrections: `correction`, `correction_level`"),
        ("aggregation", "### Aggregation: `aggregation`"),
        ("advantage", "### Advantages: `advantage`"),
    ],
)
def test_every_part_is_in_its_table(kind: str, heading: str) -> None:
    assert set(table(heading)) == set(PARTS[kind])


def test_the_table_of_presets_is_theirs() -> None:
    rows = table("## Presets")
    assert list(rows) == list(PRESETS)
    for name, (advantage, ratio, surrogate, correction, aggregation, *_) in rows.items():
        chosen = preset(name)
        if chosen.surrogate not in ("sft", "dpo", "kto"):
            assert (advantage, ratio) == (f"`{chosen.advantage}`", f"`{chosen.ratio}`")
        assert surrogate == f"`{chosen.surrogate}`"
        assert aggregation == f"`{chosen.aggregation}`"
        if chosen.correction == "none":
            assert correction.startswith("none")
        else:
            level = {"turn": "turn", "sequence": "sequence"}[chosen.correction_level]
            assert correction.startswith(f"`{chosen.correction}`")
            assert correction.endswith(f"{chosen.correction_cap:g}, {level}")


def test_every_setting_is_named() -> None:
    for field in ObjectiveSettings.model_fields:
        assert re.search(rf"\b{field}\b", PAGE), f"{field} is not in the page"


def test_every_metric_is_named() -> None:
    given = tokens(
        [-1.0] * 2,
        turn=[0, 1],
        row=[0, 1],
        reference=[-1.0] * 2,
        value=[0.0] * 2,
        old_value=[0.0] * 2,
        returns=[1.0, 2.0],
        pair=[0, 0],
        label=[1, -1],
    )
    done = compute_loss(preset("ppo"), given)
    totals = {
        k: float(v) for k, v in diagnostic_sums(given, done, given.rollout_logprobs, 1).items()
    }
    found = summarise_diagnostics(
        totals, {k: float(v) for k, v in diagnostic_maxima(given, done, 1).items()}
    )
    for name in found:
        short = re.sub(r"_lag_\d$", "_lag_", name).replace("_turn_share", "_share")
        assert short in PAGE or name == "gap_tokens", f"{name} is not in the page"


def test_the_example_of_a_part_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    module = ModuleType("my_objectives")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_objectives", module)
    first, second = (tomllib.loads(x) for x in re.findall(r"```toml\n(.*?)```", PAGE, re.S))
    assert ObjectiveSettings.model_validate(first["objective"]).clip_high == 5e-4
    settings = ObjectiveSettings.model_validate(second["objective"])
    done = compute_loss(settings, tokens([-1.0], old=[-1.5], advantage=[2.0]))
    assert done.total.item() == pytest.approx(2.0 + 0.05 * 0.25)
