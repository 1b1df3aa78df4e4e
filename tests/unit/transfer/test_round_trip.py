"""What is exported and imported elsewhere is what it was: made stores, both databases, both
formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.transfer.files import exported, imported
from support.transfer.random_stores import NewStore, everything, fill

WAYS = [("sqlite", "postgres"), ("postgres", "sqlite"), ("sqlite", "sqlite")]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("there", "here"), WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_a_copy_is_equal(
    new_store: NewStore, tmp_path: Path, seed: int, there: str, here: str, ending: str
) -> None:
    source, target = new_store(there), new_store(here)
    fill(source, seed)
    whole = everything(source)
    path = exported(source, tmp_path / f"copy.{ending}")
    first = imported(target, path).added
    assert repr(everything(target)) == repr(whole)  # NaN is not equal to itself
    assert first.rollouts == len(whole.rollouts)
    assert first.turns == sum(len(copy.turns) for copy in whole.rollouts)
    assert first.rewards == sum(len(copy.rewards) for copy in whole.rollouts)
    assert first.steps == 2
    assert first.versions == 3

    again = imported(target, path).added
    assert (again.rollouts, again.known) == (0, len(whole.rollouts))
    assert (again.turns, again.rewards, again.spans, again.steps, again.versions) == (0,) * 5
    assert repr(everything(target)) == repr(whole)
    back = exported(target, tmp_path / f"back.{ending}")
    if ending == "jsonl":
        assert back.read_bytes() == path.read_bytes()
