"""How far versions are apart, where numbers were skipped."""

from __future__ import annotations

import pytest

from support.trainer.batch_samples import Rollout, Task, selected
from support.trainer.row_samples import turn
from tracegrad_trainer.batches.version_scale import VersionScale


def place_by_hand(weights: list[int], current: int, lost: set[int]) -> dict[int, int]:
    """`weights`: of each version how many updates its weights have seen."""
    return {
        v: current - max(v in lost, abs(weights[current] - seen))
        for v, seen in enumerate(weights)
        if v <= current
    }


@pytest.mark.parametrize("current", range(6, 12))
def test_after_a_crash_places_are_by_updates(current: int) -> None:
    """Version 3 had a checkpoint, 4 and 5 are lost; 6 is 3 again, and 7 has another update."""
    weights = [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    scale = VersionScale(current, [(6, 3)])
    expected = place_by_hand(weights, current, {4, 5})
    assert {v: scale.place(v) for v in range(current + 1)} == expected


@pytest.mark.parametrize("current", [9, 10, 13])
def test_each_crash_is_counted_by_its_own(current: int) -> None:
    """Then 7 and 8 are lost too: 9 is 3 again; 11 had a checkpoint, 12 is lost, 13 is 11."""
    weights = [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 6, 5]
    skipped = [(6, 3), (9, 3), (13, 2)]
    scale = VersionScale(current, [one for one in skipped if one[0] <= current])
    lost = {4, 5, 7, 8} | ({12} if current == 13 else set())
    expected = place_by_hand(weights, current, lost)
    assert {v: scale.place(v) for v in range(current + 1)} == expected


def test_without_a_crash_versions_are_as_recorded() -> None:
    assert [VersionScale(4).place(v) for v in range(-1, 7)] == list(range(-1, 7))


@pytest.mark.parametrize(("limit", "trained"), [(2, ["old", "lost"]), (1, ["old"])])
def test_filters_and_rows_go_by_updates(limit: int, trained: list[str]) -> None:
    """One turn is of the checkpoint's own version, one of an update that was two ahead of it."""
    turns = [turn("old", [1, 2], [7, 8], version=3), turn("lost", [3, 4], [7, 8], version=5)]
    found = selected(
        [Task("g", [Rollout("r", 1.0, turns)])],
        version=26,
        skipped_versions=[(26, 23)],
        max_staleness=limit,
    )
    assert found.trained == trained
    assert list(found.skipped.values()) == ["stale"] * (2 - len(trained))
    lags = [set((26 - row.policy_version[row.keep]).tolist()) for row in found.rows]
    assert lags == [{0}, {2}][: len(trained)]
    for row in found.rows:
        assert (row.policy_version[~row.loss_mask] == -1).all()


def test_a_lost_version_is_weighed_by_its_distance() -> None:
    turns = [turn("lost", [3, 4], [7, 8], version=5)]
    found = selected(
        [Task("g", [Rollout("r", 1.0, turns)])],
        version=26,
        skipped_versions=[(26, 23)],
        stale="weight",
        stale_decay=0.5,
    )
    [row] = found.rows
    assert row.advantage[row.keep] == pytest.approx(0.25)


def test_what_a_rollback_gave_up_is_not_trained() -> None:
    """Also where a newer version went on with it; a turn of what was returned to is trained."""
    turns = [
        turn("kept", [1, 2], [7, 8], version=3),
        turn("gone", [3, 4], [7, 8], version=5),
        turn("partly", [5, 6], [7, 8], policy_versions=((6, 1), (3, 1))),
        turn("new", [9, 1], [7, 8], version=7),
    ]
    found = selected(
        [Task("g", [Rollout("r", 1.0, turns)])],
        version=7,
        skipped_versions=[(7, 4)],
        rolled_back_versions=[(4, 6)],
        max_staleness=9,
    )
    assert found.trained == ["kept", "new"]
    assert found.skipped == {"gone": "rolled_back", "partly": "rolled_back"}
