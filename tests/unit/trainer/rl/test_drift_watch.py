"""Guards in front of a batch, and over what nobody rewards: what drifted is not trained, and who
asked for it is told so."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from support.trainer.kept_versions import ServedRun
from tracegrad.events import Event, Reward, Turn
from tracegrad.store import Decision, Ledger, Store
from tracegrad.store.types import Group
from tracegrad_trainer.guards import Alarm, GuardSettings
from tracegrad_trainer.rl import unrewarded_rollouts
from tracegrad_trainer.rl.drift_watch import DriftWatch
from tracegrad_trainer.rl.unrewarded_rollouts import MOST_AT_ONCE, UnrewardedRollouts

ASKS, ANSWERS = "Shall I?", "Done."

ROLLBACK = GuardSettings(baseline=16, action="rollback")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


def replying(rollout: str, reply: str, version: int) -> Turn:
    return make_turn(
        f"t{rollout}",
        rollout,
        version=version,
        request={"model": "m", "messages": [{"role": "user", "content": "Rename x."}]},
        response={"choices": [{"message": {"role": "assistant", "content": reply}}]},
    )


def rollouts(
    reply: str, *, first: int, groups: int, version: int, size: int = 4, rewarded: bool = True
) -> list[Event]:
    """Groups of finished ones, each of which ends with `reply`."""
    events: list[Event] = []
    for number in range(first, first + groups):
        for attempt in range(size):
            name = f"{number}-{attempt}"
            turn = replying(name, reply, version)
            reward = float(attempt % 2) if rewarded else None
            task = f"task {number}" if size > 1 else None
            whole = rollout_events(name, task=task, reward=reward, turns=0, at=time.time() - 1)
            events += [whole[0], turn, *whole[1:]]
    return events


def groups_of(store: Store, reply: str, *, first: int, groups: int, version: int) -> list[Group]:
    """Leased ones of four rollouts."""
    store.append(rollouts(reply, first=first, groups=groups, version=version))
    leased = Ledger(store).lease(groups=groups, group_size=4, owner="me", ttl_s=60)
    assert len(leased) == groups
    return leased


def drifted(store: Store, watch: DriftWatch) -> bool:
    """After twenty groups that answered, of version 1, twenty that ask, of version 2."""
    assert not watch.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    return watch.stops(groups_of(store, ASKS, first=20, groups=20, version=2))


def test_a_warning_is_a_line_in_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    watch = DriftWatch(GuardSettings(baseline=16), store)
    assert not drifted(store, watch)
    assert "drift guard: questions: 100% of rollouts of the last" in caplog.text
    assert store.decisions() == []
    stats = watch.take_stats()
    assert stats["drift_alarms"] == 1
    assert stats["drift_evidence"] >= 1
    stats = watch.take_stats()
    assert stats["drift_alarms"] == 0
    assert stats["drift_evidence"] < 1


def test_training_is_paused(store: Store) -> None:
    assert drifted(store, DriftWatch(GuardSettings(baseline=16, action="pause"), store))
    [pause] = store.decisions()
    assert (pause.kind, pause.by) == ("pause", "guard:questions")
    assert "since version 2, against 0% before" in pause.reason


@pytest.mark.parametrize(
    ("keep", "gone_back_to"),
    [(5, 1), (2, 0)],  # of two there are versions 2 and 3, and the promoted one
)
def test_the_last_good_version_is_served_again(
    store: Store, tmp_path: Path, keep: int, gone_back_to: int
) -> None:
    run = ServedRun(store, tmp_path, keep=keep)
    run.serve(0)
    run.decide("promote", 0)
    run.serve(1, 2, 3)
    assert drifted(store, DriftWatch(ROLLBACK, store))
    pause, rollback = store.decisions()[1:]
    assert (pause.kind, rollback.kind, rollback.training) == ("pause", "rollback", "pause")
    run.control.look()
    assert store.decisions()[-1].refused is None
    assert store.current_version() == gone_back_to


def test_a_rollback_with_nowhere_to_go_is_refused_and_training_stays_paused(
    store: Store, tmp_path: Path
) -> None:
    run = ServedRun(store, tmp_path, keep=1)
    run.serve(0, 1, 2, 3)
    assert drifted(store, DriftWatch(ROLLBACK, store))
    run.control.look()
    [refused] = store.version_history().refused
    assert "version: 1 is not kept on disk (beyond_keep); kept are: 3" in str(refused.refused)
    assert store.training_pause() is not None


def test_of_several_drifts_the_version_before_the_first_is_served_again(
    store: Store, tmp_path: Path
) -> None:
    ServedRun(store, tmp_path).serve(0, 1, 2, 3)
    watch = DriftWatch(ROLLBACK, store)
    watch._act(
        [Alarm("questions", "more", 3), Alarm("length", "less"), Alarm("refusals", "more", 1)]
    )
    pause, rollback = store.decisions()
    assert (rollback.kind, rollback.version) == ("rollback", 1)
    assert rollback.by == pause.by == "guard:questions,length,refusals"


def test_versions_that_may_be_asked_for_are_named(store: Store) -> None:
    watch = DriftWatch(ROLLBACK, store)
    assert watch.good_versions() == set()
    watch.stops(groups_of(store, ANSWERS, first=0, groups=20, version=4))
    watch.stops(groups_of(store, ASKS, first=20, groups=2, version=5))
    watch.stops(groups_of(store, ASKS, first=22, groups=2, version=6))
    assert watch.good_versions() == {3, 4, 5}, "where the rise began, and of the last 32 groups"
    watch.stops(groups_of(store, ANSWERS, first=24, groups=60, version=9))
    assert watch.good_versions() == {8}
    again = DriftWatch(ROLLBACK, store)
    again.restore(watch.state())
    assert again.good_versions() == {8}
    assert DriftWatch(GuardSettings(action="pause"), store).good_versions() == set()


def test_what_was_stopped_is_let_through_when_training_goes_on(store: Store) -> None:
    watch = DriftWatch(GuardSettings(baseline=16, action="pause"), store)
    assert not watch.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    asking = groups_of(store, ASKS, first=20, groups=20, version=2)
    assert watch.stops(asking)
    assert not watch.stops(asking)


def test_the_version_before_a_long_drift_is_there_when_its_alarm_comes(
    store: Store, tmp_path: Path
) -> None:
    """It lies further back than the groups seen last, and the alarm's own pause tidies up."""
    run = ServedRun(store, tmp_path, keep=1)
    watch = DriftWatch(ROLLBACK, store)
    run.control._wanted = watch.good_versions
    run.serve(0)
    number = 0
    for version in range(1, 40):
        run.serve(version)
        for _ in range(4):
            reply = ASKS if version > 10 and number % 20 < 7 else ANSWERS  # 35 % of replies
            leased = groups_of(store, reply, first=number, groups=1, version=version)
            number += 1
            if watch.stops(leased):
                break
        else:
            continue
        break
    else:
        pytest.fail("no alarm")
    rollback = store.decisions()[-1]
    assert rollback.version is not None
    assert rollback.version < version - 32 // 4, "further back"
    run.serve(version + 1)  # its copy is written, and others are removed, before anybody looks
    run.control.look()
    assert [one.refused for one in store.decisions()] == [None, None]
    assert store.current_version() == rollback.version


def test_what_was_given_up_is_not_looked_at_again(store: Store, tmp_path: Path) -> None:
    """After a rollback the state is of before, and its rollouts wait in the store still."""
    run = ServedRun(store, tmp_path, keep=5)
    run.serve(0, 1)
    watch = DriftWatch(ROLLBACK, store, unrewarded(store))
    watch.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    store.append(rollouts(ANSWERS, first=20, groups=20, version=1, size=1, rewarded=False))
    assert not watch.stops_unrewarded()
    kept = watch.state()
    run.serve(2)
    store.append(rollouts(ASKS, first=60, groups=80, version=2, size=1, rewarded=False))
    assert watch.stops_unrewarded()
    run.control.look()
    assert store.current_version() == 1
    store.decide(Decision(kind="resume", by="ann@host", reason="it is mended"))
    again = DriftWatch(ROLLBACK, store, unrewarded(store))
    again.restore(kept)
    assert not again.stops_unrewarded()
    assert not again.stops(groups_of(store, ASKS, first=200, groups=20, version=2))
    assert again.stops(groups_of(store, ASKS, first=240, groups=20, version=3)), "of a new one"


def test_a_resume_after_a_restart_lets_go_on_what_stood_before_it(store: Store) -> None:
    settings = GuardSettings(baseline=16, action="pause")
    watch = DriftWatch(settings, store)
    watch.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    kept = watch.state()
    asking = groups_of(store, ASKS, first=20, groups=20, version=2)
    assert watch.stops(asking)
    again = DriftWatch(settings, store)  # while training is paused
    again.restore(kept)
    store.decide(Decision(kind="resume", by="ann@host", reason="they may ask"))
    again.let_go_on()
    assert not again.stops(asking)


# Those that nobody rewards


def unrewarded(store: Store) -> UnrewardedRollouts:
    """Looks whenever it is asked, without patience."""
    found = UnrewardedRollouts(store, {}, 0.0)
    found.ask_every_s = 0.0
    found.take()  # those that end from now on
    return found


def test_a_hack_that_gets_no_reward_is_seen(store: Store) -> None:
    """Thumbs are given to one reply in three; to a broken one, never."""
    watch = DriftWatch(GuardSettings(baseline=16, action="pause"), store, unrewarded(store))
    well = {"version": 1, "size": 1, "groups": 80}
    store.append(rollouts(ANSWERS, first=0, **well))  # type: ignore[arg-type]
    store.append(rollouts(ANSWERS, first=80, rewarded=False, **well))  # type: ignore[arg-type]
    rewarded = Ledger(store).lease(groups=80, group_size=1, owner="me", ttl_s=60)
    assert len(rewarded) == 80
    assert not watch.stops(rewarded)
    assert not watch.stops_unrewarded()
    kept = watch.state()
    store.append(rollouts(ASKS, first=200, groups=80, version=2, size=1, rewarded=False))
    assert watch.stops_unrewarded()
    [pause] = store.decisions()
    assert pause.by == "guard:questions"
    assert "rollouts without a reward, since version 2, against 0% before" in pause.reason
    again = DriftWatch(GuardSettings(baseline=16), store, unrewarded(store))
    again.restore(kept)
    assert again.state()["unrewarded"] == kept["unrewarded"]


def test_each_is_looked_at_once_and_attempts_at_a_task_together(store: Store) -> None:
    looked = unrewarded(store)
    store.append(rollouts(ASKS, first=0, groups=2, version=0, rewarded=False))
    store.append(rollouts(ASKS, first=2, groups=1, version=0, size=1, rewarded=False))
    groups = looked.take()
    assert sorted(len(group) for group in groups) == [1, 4, 4]
    assert looked.take() == []
    other = UnrewardedRollouts(store, {}, 0.0)
    other.restore(looked.state())
    assert other.take() == []
    # A thumb that comes late makes it a batch's, not another value.
    store.append([Reward(rollout_id="2-0", value=1.0)])
    late = Ledger(store).lease(groups=1, group_size=1, owner="me", ttl_s=60, at_least=1)
    watch = DriftWatch(GuardSettings(baseline=16), store, looked)
    before = watch.state()["detectors"]
    assert not watch.stops(late)
    assert watch.state()["detectors"] == before


def test_one_that_is_opened_again_is_not_looked_at_again(store: Store) -> None:
    looked = unrewarded(store)
    for name, found in (("first", 1), ("second", 0)):
        store.append([make_turn(name, "r", created_at=time.time() - 1)])
        assert len(Ledger(store).close_idle(0.5, tags={})) == 1
        assert len(looked.take()) == found


def test_the_last_ones_are_remembered(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrewarded_rollouts, "MOST_REMEMBERED", 2)
    looked = unrewarded(store)
    for number in range(3):
        store.append(rollouts(ASKS, first=number, groups=1, version=0, size=1, rewarded=False))
        assert len(looked.take()) == 1
    assert [looked.was_given(f"{number}-0") for number in range(3)] == [False, True, True]


def test_attempts_that_end_one_after_the_other_are_one_value(store: Store) -> None:
    """Of a version: a new one may do something else."""
    watch = DriftWatch(GuardSettings(baseline=16), store, unrewarded(store))

    def seen(attempt: int, version: int) -> int:
        name = f"{version}-{attempt}"
        whole = rollout_events(name, task="one task", reward=None, turns=0, at=time.time() - 1)
        store.append([whole[0], replying(name, ANSWERS, version), *whole[1:]])
        assert not watch.stops_unrewarded()
        return int(watch.state()["unrewarded"]["guards"]["detectors"]["questions"]["seen"])

    assert [seen(attempt, 1) for attempt in range(4)] == [1, 1, 1, 1]
    assert [seen(attempt, 2) for attempt in range(4)] == [2, 2, 2, 2]


def test_many_are_looked_at_in_turn(store: Store) -> None:
    looked = unrewarded(store)
    many = MOST_AT_ONCE + 40
    store.append(rollouts(ANSWERS, first=0, groups=many, version=0, size=1, rewarded=False))
    store.append(rollouts(ANSWERS, first=many, groups=1, version=0, size=1))
    assert [len(looked.take()) for _ in range(3)] == [MOST_AT_ONCE, 40, 0]
    store.append(rollouts(ANSWERS, first=many + 1, groups=1, version=0, size=1, rewarded=False))
    assert len(looked.take()) == 1


def test_who_may_still_be_rewarded_is_waited_for(store: Store) -> None:
    looked = UnrewardedRollouts(store, {}, 1000.0)
    looked.ask_every_s = 0.0
    looked.take()
    store.append(rollouts(ASKS, first=0, groups=1, version=0, rewarded=False))
    assert looked.take() == []


def test_steps_own_figures(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = DriftWatch(GuardSettings(action="pause", min_entropy=0.1), store)
    assert not watch.check_step({"entropy": 0.2})
    assert store.decisions() == []
    assert watch.check_step({"entropy": 0.05})
    assert [decision.by for decision in store.decisions()] == ["guard:entropy"]


@pytest.mark.parametrize(
    ("decided", "refused", "is_usual"),
    [
        (["resume"], None, True),
        (["rollback", "resume"], None, False),
        (["resume", "rollback"], None, False),
        (["rollback", "resume"], "version: 0 is not kept", True),
    ],
)
def test_what_somebody_let_go_on_is_usual_after_a_restart(
    store: Store, decided: list[Any], refused: str | None, is_usual: bool
) -> None:
    """Unless they went back: what is usual is then what it was."""
    settings = GuardSettings(baseline=16, action="pause")
    watch = DriftWatch(settings, store)
    watch.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    kept = watch.state()
    assert watch.stops(groups_of(store, ASKS, first=20, groups=20, version=2))
    made: dict[str, Any] = {"by": "ann@host", "reason": "they may ask"}
    for kind in decided:
        if kind == "rollback":
            seq = store.decide(Decision(kind=kind, version=0, training="pause", **made))
            store.close_decision(seq, {} if refused is None else {"refused": refused})
        else:
            store.decide(Decision(kind=kind, **made))
    again = DriftWatch(settings, store)
    again.restore(kept)
    asking = groups_of(store, ASKS, first=40, groups=20, version=2)
    assert again.stops(asking) is not is_usual


def test_what_was_seen_is_kept_with_a_checkpoint(store: Store) -> None:
    settings = GuardSettings(baseline=16, action="pause")
    first, second = DriftWatch(settings, store), DriftWatch(settings, store)
    assert not first.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    second.restore(first.state())
    assert second.stops(groups_of(store, ASKS, first=20, groups=20, version=2))
