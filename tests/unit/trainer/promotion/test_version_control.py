"""Rank 0 acts on decisions: what is served, kept, promoted, and refused in one line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from support.trainer.kept_versions import CountingPusher, ServedRun
from tracegrad.store import Decision, Store
from tracegrad_trainer.promotion.kept_weights import KeptWeights
from tracegrad_trainer.promotion.version_control import TrainingRolledBack


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path}/store.db")


def test_the_newest_are_kept_and_the_others_go_with_a_reason(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path, keep=2)
    run.serve(0, 1, 2, 3)
    assert run.kept() == [2, 3]
    records = store.version_history().records
    assert records[0].not_kept == records[1].not_kept == "beyond_keep"
    assert records[3].kept_bytes
    assert run.control._kept.versions() == [2, 3]


def test_pinned_and_promoted_ones_stay(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path, keep=1)
    run.serve(0)
    assert run.decide("pin", 0).outcome == {"version": 0}
    run.serve(1)
    assert run.decide("promote", 1).outcome == {"version": 1}
    run.serve(2, 3, 4)
    assert run.kept() == [0, 1, 4]
    assert run.states() == {0: "served", 1: "promoted", 2: "served", 3: "served", 4: "served"}
    run.decide("unpin", 0)
    assert run.kept() == [1, 4]


def test_those_that_a_guard_may_ask_for_stay(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path, keep=1)
    run.no_checkpoint = {3}
    run.serve(0, 1)
    run.wanted = {3, 1}  # of 3 there is nothing on disk: the newest before it has to do
    run.serve(2, 3, 4, 5)
    assert run.kept() == [1, 2, 4, 5], "and those since may be wanted yet"
    run.wanted = {4}
    run.serve(6)
    assert run.kept() == [4, 5, 6]
    run.wanted = set()
    run.serve(7)
    assert run.kept() == [7]


def test_of_many_that_may_be_wanted_yet_some_stay(store: Store, tmp_path: Path) -> None:
    """As where thumbs come twenty versions late."""
    run = ServedRun(store, tmp_path, keep=1)
    run.serve(0)
    most = 0
    for version in range(1, 40):
        run.wanted = {max(0, version - 20)}
        run.serve(version)
        most = max(most, len(run.kept()))
        nearest = store.version_history().kept_before(max(0, version - 10))
        assert nearest is not None
        assert version - 10 - nearest < 4
    assert most < 13


def test_nothing_is_pruned_before_guards_remember(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path, keep=1)
    run.wanted = {0}
    run.serve(0, 1, 2)
    run.wanted = set()  # a guard's state is restored after what was decided meanwhile
    store.decide(Decision(kind="pin", version=2, by="ann@host", reason="for later"))
    run.begin_again()
    assert run.kept() == [0, 1, 2]


def test_a_rollback_serves_the_weights_themselves_and_ends_the_ranks(
    store: Store, tmp_path: Path
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1, 2, 3)
    assert run.control.hold() is None
    done = run.decide("rollback", 1)
    assert done.outcome is not None
    assert run.pusher.loaded[-1] == 1.0
    assert store.current_version() == 1
    assert {name: done.outcome[name] for name in ("version", "from", "newest", "last_step")} == {
        "version": 1, "from": 3, "newest": 3, "last_step": 3,
    }  # fmt: skip
    assert run.states() == {0: "served", 1: "served", 2: "rolled_back", 3: "rolled_back"}
    with pytest.raises(TrainingRolledBack, match=r"version 1 is served again, by ann@host"):
        run.control.hold()
    with pytest.raises(TrainingRolledBack), run.control.committing():
        raise AssertionError("nothing is committed after a rollback")


def test_without_a_version_it_goes_to_the_promoted_one_or_the_one_before(
    store: Store, tmp_path: Path
) -> None:
    run = ServedRun(store, tmp_path, keep=9)
    run.serve(0, 1, 2, 3)
    history = store.version_history()
    assert history.rollback_target() == 2
    run.decide("promote", 1)
    assert store.version_history().rollback_target() == 1
    run.decide("rollback", None)
    assert store.current_version() == 1
    # From the promoted one back: the last that was served well before it.
    assert store.version_history().rollback_target() == 0


@pytest.mark.parametrize(
    ("kind", "version", "said"),
    [
        ("rollback", 9, "version: there is no version 9; the newest is 4"),
        ("promote", 0, r"version: 0 is not kept on disk \(beyond_keep\); kept are: 2, 3, 4"),
        ("pin", 1, "version: 1 is not kept on disk"),
        ("unpin", 3, "version: 3 is not pinned"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    store: Store, tmp_path: Path, kind: str, version: int, said: str
) -> None:
    run = ServedRun(store, tmp_path, keep=3)
    run.serve(0, 1, 2, 3, 4)
    refused = run.decide(kind, version).refused
    assert refused is not None
    assert re.match(said, refused)
    assert store.current_version() == 4
    assert run.control.hold() is None


@pytest.mark.parametrize("kind", ["promote", "rollback", "pin"])
def test_a_version_whose_checkpoint_is_gone_is_refused(
    store: Store, tmp_path: Path, kind: str
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1, 2)
    run.no_checkpoint = {1}  # removed by hand, since
    assert run.decide(kind, 1).refused == "step 1 has no checkpoint of its own"
    assert store.current_version() == 2
    assert store.version_history().promoted is None
    assert run.control.hold() is None


def test_a_version_without_a_checkpoint_is_not_kept(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path)
    run.no_checkpoint = {2}
    run.serve(0, 1, 2)
    assert run.kept() == [0, 1]
    assert store.version_history().records[2].not_kept == "no_checkpoint"


def test_a_version_that_is_replaced_before_its_turn_is_not_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1)
    with monkeypatch.context() as copying:
        copying.setattr(KeptWeights, "busy", True)
        run.serve(2)
        run.decide("rollback", 1)
    run.control.look()
    run.control._kept.wait()
    assert run.kept() == [0, 1]
    assert store.version_history().records[2].not_kept == "busy"


def test_a_version_that_is_replaced_while_it_is_looked_at_is_kept_as_it_was(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0)
    with monkeypatch.context() as copying:
        copying.setattr(KeptWeights, "busy", True)
        run.serve(1)
    looked_at = run.pusher.newest
    run.pusher.push(2, 2.0)
    served = iter([looked_at, run.pusher.newest])
    monkeypatch.setattr(CountingPusher, "newest", property(lambda _: next(served)), raising=False)
    run.control.look()
    run.control._kept.wait()
    [file] = run.control._kept.path(1).glob("*.safetensors")
    assert float(load_file(file)["w"]) == 1.0


def test_a_run_that_begins_finds_what_the_one_before_left_served(
    store: Store, tmp_path: Path
) -> None:
    run = ServedRun(store, tmp_path)
    assert run.control.fetch_left_served(tmp_path / "left") is None
    run.no_checkpoint = {2}
    run.serve(0, 1)
    found = run.begin_again().fetch_left_served(tmp_path / "left")
    assert found is not None
    assert found.version == 1
    assert [float(load_file(path)["w"]) for path in found.paths] == [1.0]
    run.serve(2)
    assert run.begin_again().fetch_left_served(tmp_path / "left") is None, "it is not kept"


def test_what_is_left_served_beside_a_candidate_is_the_promoted_one(
    store: Store, tmp_path: Path
) -> None:
    run = ServedRun(store, tmp_path, gate="canary")
    run.serve(0)
    run.decide("promote", 0)
    run.serve(1)
    assert (run.pusher.version, run.pusher.newest.version) == (0, 1)
    found = run.begin_again().fetch_left_served(tmp_path / "left")
    assert found is not None
    assert found.version == 0


def test_what_was_returned_to_while_nothing_ran_is_in_place_of_what_was_left_served(
    store: Store, tmp_path: Path
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1, 2)
    bad = {"version": 1, "by": "ann@host", "reason": "2 is bad"}
    store.decide(Decision(kind="rollback", training="continue", **bad))
    found = run.begin_again().fetch_left_served(tmp_path / "left")
    assert found is not None
    assert store.current_version() == 2, "nobody has served another yet"
    assert found.version == 1


def test_weights_left_served_that_are_damaged_are_left_alone(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0)
    file = run.state_dir / "versions" / "version-00000000" / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert run.control.fetch_left_served(tmp_path / "left") is None
    assert "is damaged" in caplog.text


def test_weights_that_have_no_room_beside_are_read_where_they_are_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0)
    kept = run.control._kept
    [file] = kept.path(0).glob("*.safetensors")
    target = tmp_path / "target"
    size = file.stat().st_size
    for free, where in ((size, kept.path(0)), (size + 1, target)):
        left = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, left=left: left)
        assert kept.copy_to(0, target).paths == (str(where / file.name),)
        assert target.exists() == (where == target)


def test_damaged_weights_are_not_served(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1)
    [file] = run.control._kept.path(0).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused = run.decide("rollback", 0).refused
    assert refused is not None
    assert "is damaged" in refused
    assert store.current_version() == 1


def test_a_push_that_the_engine_refuses_is_said(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1)
    run.pusher.refuses = "version 0 is not served, version 1 still is"
    assert run.decide("rollback", 0).refused == run.pusher.refuses
    assert store.current_version() == 1
    run.control.check()


def test_an_engine_that_sleeps_is_waited_for(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1)
    run.pusher.can_roll_back = False
    assert run.decide("rollback", 0).acted_at is None
    assert run.decide("pin", 1).acted_at is None, "decisions are acted on in order"
    run.pusher.can_roll_back = True
    run.control.look()
    assert store.current_version() == 0
    assert store.open_decisions() == []


def test_a_rollback_waits_for_the_first_push_of_a_run_that_begins(
    store: Store, tmp_path: Path
) -> None:
    """What it is to replace would come after it, and be served."""
    run = ServedRun(store, tmp_path)
    run.serve(0, 1)
    again = run.begin_again()
    again._pusher = pusher = CountingPusher(tmp_path / "scratch" / "again")
    who = {"by": "ann@host", "reason": "tested"}
    store.decide(Decision(kind="rollback", version=0, training="continue", **who))  # type: ignore[arg-type]
    again.look()
    assert (len(store.open_decisions()), pusher.loaded) == (1, [])
    pusher.push(1, 1.0)
    again.look()
    assert (store.open_decisions(), pusher.loaded) == ([], [1.0, 0.0])


def test_what_is_served_again_stays_on_disk(store: Store, tmp_path: Path) -> None:
    """A run that begins serves it from there."""
    run = ServedRun(store, tmp_path, keep=1)
    run.wanted = {1}
    run.serve(0, 1, 2, 3)
    run.decide("rollback", 1)
    run.wanted = set()
    run.decide("pin", 3)
    assert run.kept() == [1, 3]


def test_training_is_paused_and_goes_on(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0)
    run.decide("pause")
    assert run.control.hold() == "paused by ann@host: tested"
    assert run.begin_again().hold() == "paused by ann@host: tested"
    run.decide("resume")
    assert run.control.hold() is None


def test_what_was_decided_while_nothing_ran_is_acted_on_at_the_start(
    store: Store, tmp_path: Path
) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1, 2)
    who = {"by": "ann@host", "reason": "tested"}
    store.decide(Decision(kind="pin", version=0, **who))  # type: ignore[arg-type]
    store.decide(Decision(kind="rollback", version=1, training="pause", **who))  # type: ignore[arg-type]
    again = run.begin_again()
    assert store.open_decisions() == []
    history = store.version_history()
    assert history.rollback is not None
    assert history.rollback.outcome is not None
    assert history.rollback.outcome["served"] is False
    assert history.rollback.outcome["version"] == 1
    assert again.hold() == "paused by ann@host: tested"
    assert history.records[0].pinned


def test_a_start_forgets_what_was_never_committed(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path)
    run.serve(0, 1, 2)
    run.no_checkpoint = {2}
    kept = run.control._kept
    shutil.copytree(kept.path(0), kept.path(9))  # it was killed before that was noted
    run.begin_again()
    assert run.kept() == [0, 1]
    assert kept.versions() == [0, 1]


def test_what_is_decided_about_stays_until_it_is_acted_on(store: Store, tmp_path: Path) -> None:
    """A guard decides to pause, and then to go back: what it goes back to is there still."""
    run = ServedRun(store, tmp_path, keep=1)
    run.wanted = {1}
    run.serve(0, 1, 2, 3)
    run.wanted = set()
    reason: dict[str, Any] = {"by": "guard:questions", "reason": "questions: 90% of ..."}
    store.decide(Decision(kind="pause", **reason))
    store.decide(Decision(kind="rollback", version=1, training="pause", **reason))
    run.control.look()
    assert [one.refused for one in store.decisions()] == [None, None]
    assert store.current_version() == 1
    store.decide(Decision(kind="pin", version=3, by="ann@host", reason="to compare"))
    run.serve(4, 5)
    assert 3 in run.kept(), "somebody's decision is open"


def test_a_rollback_to_the_last_good_version_keeps_it(store: Store, tmp_path: Path) -> None:
    run = ServedRun(store, tmp_path, keep=2)
    run.serve(0, 1)
    store.decide(Decision(kind="pause", by="ann@host", reason="to look"))
    store.decide(Decision(kind="rollback", training="pause", by="ann@host", reason="empty replies"))
    run.control._settings = run.promotion.model_copy(update={"keep": 1})
    run.control.look()
    assert store.decisions()[-1].refused is None
    assert store.current_version() == 0
