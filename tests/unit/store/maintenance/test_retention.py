"""Old rollouts out of the store: trained ones first, never an un-trained one by surprise."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from support.store.events import chain, make_span, make_turn, rollout_events
from support.store.maintenance import selection
from tracegrad.events import Outcome, Reward, RolloutStarted
from tracegrad.store import Ledger, ParentMissing, Scoring, StepRecord, Store
from tracegrad.store.databases.upkeep import upkeep_of
from tracegrad.store.maintenance import (
    PrunePreview,
    RetentionRule,
    preview_prune,
    prune,
    retention,
    total_removed,
)
from tracegrad.store.maintenance.retention import used_bytes
from tracegrad.store.models import Base, Removals

OLD = RetentionRule(selection=selection(before=5000.0))


def trained(store: Store, *rollouts: str, step: int = 1, at: float = 1000.0) -> None:
    for rollout_id in rollouts:
        span = make_span(abs(hash(rollout_id)), rollout_id)
        store.append([*rollout_events(rollout_id, at=at), span])
        store.add_key(rollout_id, rollout_id.encode().ljust(32, b"k"))
    turns = [turn.turn_id for name in rollouts for turn in store.rollout_turns(name)]
    Ledger(store).commit_step(
        StepRecord(step=step, version=step),
        trained=turns[1:],
        skipped={turns[0]: "over_budget"},
        rollouts=rollouts,
    )


def ids(store: Store) -> set[str]:
    return {row.rollout_id for row in store.rollouts(limit=None)}


def rows(store: Store) -> dict[str, int]:
    with store.reading() as connection:
        return {
            name: connection.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
        }


def test_all_of_a_trained_rollout_goes_and_its_step_stays(store: Store) -> None:
    trained(store, "a", "b")
    scored: dict[str, Any] = {
        "scorer": "s",
        "digest": "d",
        "turns": 2,
        "round": 0,
        "parts": {"s": 1.0},
    }
    assert store.record_scorings([Scoring(rollout_id="a", state="scored", **scored)], [])
    removed = prune(store, OLD)
    assert ids(store) == set()
    left = {name: count for name, count in rows(store).items() if count}
    assert left == {"steps": 1, "removals": 1}
    assert removed == {
        "rollouts": 2,
        "by_state": {"trained": 2},
        "turns": 4,
        "trained": 3,
        "steps": {"1": 3},
        "skipped": {"over_budget": 1},
        "texts": 0,
        "pending": {},
        "spans": 2,
        "rewards": 2,
        "scorings": 1,
        "outcomes": 2,
        "rollout_tags": 0,
        "rollout_keys": 2,
        "over_sampled": 0,
        "rollout_places": 0,
        "leases": 0,
        "bytes": removed["bytes"],
    }
    with store.reading() as connection:
        assert total_removed(connection) == removed


def test_what_waits_is_leased_or_open_stays_until_it_is_asked_for(store: Store) -> None:
    trained(store, "done")
    store.append(rollout_events("broken", outcome=Outcome.INFRA_ERROR))
    store.append(rollout_events("leased", task="other"))
    [group] = Ledger(store).lease(groups=1, group_size=1, owner="trainer", ttl_s=60)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["leased"]
    store.append(rollout_events("waiting"))
    store.append(rollout_events("unrewarded", reward=None))
    store.append(rollout_events("open", outcome=None))
    store.append(rollout_events("judged", held_out=True))
    store.append(rollout_events("judging", held_out=True, outcome=None))

    found = preview_prune(store, OLD)
    assert found.removed["by_state"] == {"trained": 1, "skipped": 1, "held_out": 1}
    assert found.kept == {"leased": 1, "waiting": 1, "no_reward": 1, "open": 1, "held_out": 1}
    prune(store, OLD)
    assert ids(store) == {"leased", "waiting", "unrewarded", "open", "judging"}

    prune(store, RetentionRule(selection=OLD.selection, also_untrained=True))
    assert ids(store) == set()
    with store.reading() as connection:
        pending = total_removed(connection)["pending"]
    assert pending == {"leased": 2, "waiting": 2, "no_reward": 2, "open": 2, "held_out": 4}


def test_age_counts_from_the_end_and_of_open_rollouts_from_the_last_turn(store: Store) -> None:
    trained(store, "old", step=1, at=1000.0)
    trained(store, "young", step=2, at=4999.5)  # it ended at 5000.5
    store.append([RolloutStarted(rollout_id=name, opened_at=1000.0) for name in ("idle", "busy")])
    store.append([make_turn("b", "busy", created_at=9000.0)])
    prune(store, RetentionRule(selection=OLD.selection, also_untrained=True))
    assert ids(store) == {"young", "busy"}


def test_filters_choose_among_the_old(store: Store) -> None:
    trained(store, "a", "b")
    prune(store, RetentionRule(selection=selection("a", task="task", before=5000.0)))
    assert ids(store) == {"b"}
    prune(store, RetentionRule(selection=selection(task="nothing")))
    assert ids(store) == {"b"}


def test_a_preview_names_what_the_run_removes_and_changes_nothing(store: Store) -> None:
    trained(store, "a", "b")
    before = rows(store)
    found: PrunePreview = preview_prune(store, OLD)
    assert rows(store) == before
    removed = prune(store, OLD)
    assert {name: removed[name] for name in found.removed} == found.removed


def test_the_oldest_go_until_the_store_is_small_enough(store: Store) -> None:
    chance = random.Random(1)
    for number in range(20):
        text = {"messages": [chance.random() for _ in range(5000)]}
        ids_ = [chance.randrange(1 << 30) for _ in range(9000)]
        name = f"r{number:02}"
        ended = rollout_events(name, at=1000.0 + number, turns=0, outcome=Outcome.ABORTED)
        store.append([make_turn(f"{name}.0", name, request=text, new=ids_, created_at=1.0), *ended])
    with store.reading() as connection:
        used = used_bytes(store, connection)
    assert prune(store, RetentionRule(selection=selection(), max_bytes=used))["rollouts"] == 0
    half = RetentionRule(selection=selection(), max_bytes=used // 2)
    removed = prune(store, half, at_once=3)
    left = sorted(ids(store))
    assert left == [f"r{number:02}" for number in range(20 - len(left), 20)]
    assert 9 <= removed["rollouts"] <= 12
    with store.reading() as connection:
        assert used_bytes(store, connection) <= 0.62 * used
        # Several transactions, and a row for each.
        assert connection.scalar(select(func.count()).select_from(Removals)) == 4
    # Room that is free inside the files is not counted as taken again.
    assert prune(store, half)["rollouts"] <= 2


def test_of_what_may_go_by_size_the_trained_go_before_the_older_untrained(store: Store) -> None:
    store.append(rollout_events("older", at=10.0))
    trained(store, "younger", at=20.0)
    trained(store, "youngest", step=2, at=30.0)
    with store.reading() as connection:
        used = used_bytes(store, connection)
    for most, left in ((used - 1, {"older", "youngest"}), (1, set())):
        prune(store, RetentionRule(selection=selection(), max_bytes=most, also_untrained=True))
        assert ids(store) == left


def test_spans_of_no_rollout_go_by_age_alone(store: Store) -> None:
    store.append([make_span(n, start_ns=at, end_ns=at) for n, at in ((1, 10**12), (2, 9 * 10**12))])
    prune(store, RetentionRule(selection=selection(task="x", before=5000.0)))
    assert rows(store)["spans"] == 2
    by_size = RetentionRule(selection=OLD.selection, max_bytes=1)
    assert "loose_spans" not in prune(store, by_size)
    assert prune(store, OLD)["loose_spans"] == 1
    assert rows(store)["spans"] == 1
    assert "loose_spans" not in prune(store, OLD)


def test_totals_add_up_with_what_was_removed(store: Store) -> None:
    trained(store, "a", "b", step=1)
    trained(store, "c", step=2, at=9000.0)
    store.append([make_turn("late", "a", created_at=1000.0)])
    before = store.turn_counts()
    prune(store, OLD)
    now = store.turn_counts()
    with store.reading() as connection:
        removed = total_removed(connection)
    assert now.captured + removed["turns"] == before.captured == 7
    assert now.trained + removed["trained"] == before.trained
    for reason in ("over_budget", "late"):
        skipped = now.skipped.get(reason, 0) + removed["skipped"][reason]
        assert skipped == before.skipped[reason] > 0


def test_a_rollout_that_is_pruned_under_a_writer_begins_again_bare(store: Store) -> None:
    root = make_turn("root", "r", created_at=1000.0)
    store.append([*rollout_events("r", turns=0, outcome=Outcome.ABORTED), root])
    prune(store, OLD)
    # The writer still has the rollout and the turn in memory.
    store.append([make_turn("fresh", "r", created_at=6000.0)])
    store.append([Reward(rollout_id="r", value=1.0)])
    [row] = store.rollouts()
    assert (row.rollout_id, row.task_id, row.turns, row.reward) == ("r", None, 1, 1.0)


def test_a_turn_whose_parent_was_pruned_is_refused_by_that_name(store: Store) -> None:
    root = make_turn("root", "r", created_at=1000.0)
    store.append([*rollout_events("r", turns=0, outcome=Outcome.ABORTED), root])
    prune(store, OLD)
    for _ in range(2):  # from memory, and from what is stored
        with pytest.raises(ParentMissing, match="turn root"):
            store.append([make_turn("child", "r", parent=root)])
    assert ids(store) == set()


def test_writers_go_on_while_rollouts_are_pruned(url: str) -> None:
    with Store.open(url) as store, Store.open(url) as writing:
        for number in range(60):
            store.append(rollout_events(f"old{number}", outcome=Outcome.ABORTED, turns=3))
        done = threading.Event()

        def write() -> None:
            number = 0
            while not done.is_set() or number < 20:
                for turn in chain(f"new{number}", 2):
                    writing.append([turn])
                number += 1

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(write)
            removed = prune(store, OLD, at_once=5)
            done.set()
            writer.result()
        assert removed["rollouts"] == 60
        assert not {name for name in ids(store) if name.startswith("old")}
        for name in ids(store):
            assert len(store.rollout_turns(name)) == 2


def test_a_rollout_that_is_being_written_to_is_left_for_the_next_run(postgres_url: str) -> None:
    with Store.open(postgres_url) as store:
        trained(store, "busy", "idle")
        with store.appending() as connection:
            connection.exec_driver_sql(
                "INSERT INTO rewards (reward_id, rollout_id, value, name, source, created_at) "
                "VALUES ('late', 'busy', 1, 'reward', 'agent', 1)"
            )
            # Were it to wait for this transaction, it would not come back.
            assert prune(store, OLD)["rollouts"] == 1
        assert ids(store) == {"busy"}
        assert prune(store, OLD)["rewards"] == 2


def test_the_file_becomes_smaller(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(f"sqlite:///{path}") as store:
        for number in range(30):
            text = {"messages": [f"{number}.{n}" for n in range(20_000)]}
            turn = make_turn(f"t{number}", f"r{number}", request=text, created_at=1.0)
            store.append([turn, *rollout_events(f"r{number}", turns=0, outcome=Outcome.ABORTED)])
        upkeep = upkeep_of(store.database)
        first = upkeep.reclaim(whole=False)
        assert first.note == "0% of the file is free: it is used again"
        prune(store, OLD)
        assert store.rollouts() == []  # the store's own connections do not stop it
        second = upkeep.reclaim(whole=False)
        assert second.note == ""
        assert second.after == path.stat().st_size < second.before / 4


def test_a_disk_without_room_for_a_copy_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: left)
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        note = upkeep_of(store.database).reclaim(whole=True).note
    assert note.endswith("and the disk has 100,000 left")


def test_a_transaction_is_bounded_by_what_it_removes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        store.append(rollout_events(f"r{number}", outcome=Outcome.ABORTED))
    monkeypatch.setattr(retention, "_BYTES_AT_ONCE", 1)
    assert prune(store, OLD)["rollouts"] == 5
    assert rows(store)["removals"] == 5
