"""Each kind of damage is named, with its fix; a healthy store has no findings."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from support.store.conversations import conversation
from support.store.corruption import corrupt
from support.store.doctor_findings import Breaks, found, healthy, look
from support.store.doctor_findings import breaks as breaks
from support.store.events import make_turn, rollout_events
from support.store.maintenance import drop, remove, selection
from support.store.redactions import rule
from tracegrad.events import Reward, RolloutStarted
from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad.store.maintenance import Finding, examine, redact
from tracegrad.store.maintenance.findings import truncate_findings


def test_a_healthy_store_is_silent(store: Store) -> None:
    healthy(store)
    report = look(store)
    assert report.findings == []
    assert (report.ok, report.rollouts, report.turns) == (True, 6, 9 + 4 + 1 + 2)


def test_an_empty_store_is_silent(store: Store) -> None:
    assert look(store).findings == []


def test_a_store_that_was_taken_care_of_is_silent(store: Store) -> None:
    healthy(store)
    drop(store, "r0")
    found = redact(store, rule("message 2", selection=selection("deltas"), drop_tokens=True))
    assert found.removed["tokens_dropped"] == 2
    # Step 0 has no turns any more, and that is known.
    assert remove(store, "r0")["steps"] == {"0": 2}
    assert look(store).findings == []


@pytest.mark.parametrize(
    ("statement", "subject", "missing"),
    [
        ("DELETE FROM rollouts", "turns 1", "rollout_id is r, and rollouts has none"),
        ("UPDATE turns SET request_base = 'x'", "turns 1", "request_base is x, and turns has none"),
        ("UPDATE turns SET parent_id = 'x'", "turns 1", "parent_id is x, and turns has none"),
        ("UPDATE rewards SET rollout_id = 'x'", "rewards 1", "rollout_id is x"),
        (
            "INSERT INTO turn_ledger VALUES ('x', NULL, 'late', 1, NULL)",
            "turn_ledger x",
            "turn_id is x, and turns has none",
        ),
        ("UPDATE rollouts SET consumed_step = 7", "rollouts r", "consumed_step is 7"),
    ],
)
def test_rows_that_refer_to_nothing(
    store: Store, breaks: Breaks, statement: str, subject: str, missing: str
) -> None:
    store.append([make_turn("t"), Reward(rollout_id="r", value=1.0)])
    breaks(statement)
    orphans = [f for f in look(store).findings if f.check == "orphans"]
    assert subject in [f.subject for f in orphans]
    assert any(missing in f.message for f in orphans)
    assert all(f.broken and f.fix for f in orphans)


def test_counts_that_do_not_add_up(store: Store, breaks: Breaks) -> None:
    store.append([make_turn("t"), make_turn("u", "s")])
    breaks("DELETE FROM rollouts WHERE rollout_id = 's'")
    [sums] = [f for f in look(store).findings if f.check == "sums"]
    assert sums.message == "2 turns are stored, and 0 trained + 0 skipped + 1 pending are 1"


def test_gaps_in_steps_and_versions(store: Store, breaks: Breaks) -> None:
    healthy(store)
    ledger = Ledger(store)
    for step in (2, 3):
        name = f"more{step}"
        store.append(rollout_events(name, turns=1, at=time.time() - 9))
        ledger.commit_step(
            StepRecord(step=step, version=step + 1),
            trained=[f"{name}.0"],
            skipped={},
            rollouts=[name],
        )
    store.record_version(PolicyVersion(version=7, step=9, state="serving"))
    breaks("UPDATE turn_ledger SET step = 3 WHERE step = 2")
    breaks("UPDATE rollouts SET consumed_step = 3 WHERE consumed_step = 2")
    breaks("DELETE FROM steps WHERE step = 2")
    report = look(store)
    named = {(f.check, f.subject, f.message, f.broken) for f in report.findings}
    assert named == {
        ("steps", "steps 2", "1 is followed by 3", False),
        ("versions", "versions 4 to 6", "3 is followed by 7", False),
    }
    assert report.ok


def test_turns_of_a_version_that_never_served(store: Store) -> None:
    healthy(store)
    store.record_version(PolicyVersion(version=4, step=3, state="failed"))
    store.append([make_turn("late", "r2", version=4), *rollout_events("skipped", version=4)])
    fates = {turn.turn_id: "failed_push" for turn in store.rollout_turns("skipped")}
    Ledger(store).commit_skipped(fates, ["skipped"])
    [finding] = found(store, "versions")
    assert finding.subject == "version 4"
    assert finding.message.startswith("1 turns were sampled by it")


def test_a_step_whose_turns_are_missing(store: Store, breaks: Breaks) -> None:
    healthy(store)
    breaks("DELETE FROM turn_ledger WHERE step = 0")
    [finding] = found(store, "steps")
    assert (finding.subject, finding.broken) == ("step 0", True)
    breaks("UPDATE rollouts SET consumed_step = NULL WHERE consumed_step = 0")
    [finding] = found(store, "steps")
    assert (finding.subject, finding.broken) == ("step 0", False)


def test_a_trained_rollout_that_waits(store: Store, breaks: Breaks) -> None:
    healthy(store)
    breaks("UPDATE rollouts SET consumed_at = NULL, consumed_step = NULL WHERE rollout_id = 'r0'")
    [finding] = found(store, "consumed")
    assert finding.subject == "rollout r0"
    [repaired] = found(store, "consumed", fix=True)
    assert repaired.fixed
    assert store.rollout("r0").summary.consumed_step == 0
    assert found(store, "consumed") == []


def test_a_lease_that_ran_out(store: Store) -> None:
    store.append(rollout_events("r", at=time.time() - 9))
    Ledger(store).lease(groups=1, group_size=1, owner="trainer-1", ttl_s=0.001)
    time.sleep(0.01)
    [finding] = found(store, "leases")
    assert "trainer-1 held 1 rollouts" in finding.message
    assert not finding.broken
    [repaired] = found(store, "leases", fix=True)
    assert (repaired.fixed, repaired.count) == (True, 1)
    assert found(store, "leases") == []
    [group] = Ledger(store).lease(groups=1, group_size=1, owner="trainer-2", ttl_s=60)
    assert group.rollouts[0].rollout_id == "r"


def test_rollouts_that_are_open_for_long(store: Store) -> None:
    day = 86_400
    store.append([RolloutStarted(rollout_id="idle", opened_at=time.time() - 2 * day)])
    store.append([RolloutStarted(rollout_id="busy", opened_at=time.time() - 2 * day)])
    store.append([make_turn("b", "busy"), make_turn("u", "untitled", created_at=1000.0)])
    [finding] = found(store, "open")
    assert (finding.count, finding.subject) == (1, "rollout idle")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e+308"])
def test_a_reward_that_is_no_finite_number(store: Store, breaks: Breaks, value: str) -> None:
    store.append([Reward(reward_id="w", rollout_id="r", value=1.0)])
    if value == "nan" and store.database.url.get_backend_name() == "sqlite":
        return  # which stores it as NULL, and refuses it
    breaks("UPDATE rewards SET value = ?", float(value))
    [finding] = found(store, "rewards")
    assert finding.subject == "rollout r"
    assert f"reward w is {value}" in finding.message


def test_keys_of_rollouts_that_never_came(store: Store, breaks: Breaks) -> None:
    store.add_key("never", b"n" * 32)
    store.add_key("soon", b"s" * 32)
    breaks("UPDATE rollout_keys SET created_at = 1000 WHERE rollout_id = 'never'")
    [finding] = found(store, "keys")
    assert finding.count == 1
    found(store, "keys", fix=True)
    assert found(store, "keys") == []
    assert store.key_owner(b"s" * 32) == ("soon", "calls")


def test_a_missing_index_is_named_and_made(empty_url: str) -> None:
    with Store.open(empty_url) as store:
        corrupt(empty_url, "DROP INDEX ix_turns_parent_id")
        [finding] = found(store, "schema")
        assert "ix_turns_parent_id" in finding.message
        [repaired] = found(store, "schema", fix=True)
        assert repaired.fixed
        assert found(store, "schema") == []


def test_a_missing_column_is_named(empty_url: str) -> None:
    with Store.open(empty_url) as store:
        corrupt(empty_url, "ALTER TABLE spans DROP COLUMN status")
        [finding] = found(store, "schema")
    assert finding.message == "the column spans.status is missing"


def test_what_only_refers_to_something_gone_is_fixed_without_a_loss(
    store: Store, breaks: Breaks
) -> None:
    turns = conversation()
    store.append([*turns, Reward(rollout_id="r", value=1.0)])
    breaks("DELETE FROM rollouts")
    breaks("INSERT INTO turn_ledger VALUES ('x', NULL, 'late', 1, NULL)")
    assert not look(store).ok
    report = look(store, fix=True)
    assert report.ok
    assert {f.check for f in report.findings} == {"orphans"}
    assert all(f.fixed for f in report.findings)
    assert look(store).findings == []
    assert store.rollout_turns("r") == turns
    assert store.rollout("r").summary.reward == 1.0


def test_a_damaged_file_is_reported(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        for number in range(40):
            store.append(rollout_events(f"r{number}", at=time.time() - 9, turns=3))
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    content = path.read_bytes()
    # An index loses its order: two of its keys change places.
    at = content.rindex(b"r7.1")
    path.write_bytes(content[:at] + b"r9.9" + content[at + 4 :])
    with Store.open(sqlite_url) as store:
        faults = [f for f in examine(store).findings if f.check == "database"]
    assert faults
    assert all(f.broken and ".recover" in f.fix for f in faults)


def test_pages_that_cannot_be_read_end_one_check_and_not_the_others(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        for number in range(40):
            store.append(rollout_events(f"r{number}", at=time.time() - 9, turns=3))
        with store.reading() as connection:
            page: int = connection.exec_driver_sql(
                "SELECT rootpage FROM sqlite_master WHERE name = 'rewards'"
            ).scalar_one()
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = bytes(4096)
    path.write_bytes(content)
    with Store.open(sqlite_url) as store:
        report = examine(store)
    assert not report.ok
    assert "ledger" in [f.subject for f in report.findings]
    assert all("malformed" in f.message for f in report.findings if f.subject == "ledger")
    assert report.turns == 120


def test_a_server_that_may_lose_what_it_acknowledged_is_reported(postgres_url: str) -> None:
    with Store.open(postgres_url) as store:
        report = examine(store)
    messages = [f.message for f in report.findings]
    assert [m.partition(" ")[0] for m in messages] == ["fsync", "full_page_writes"]
    assert report.ok
    assert report.findings[0].fix.startswith("ALTER SYSTEM SET fsync = on")


def test_a_disk_that_is_nearly_full_is_reported(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = shutil.disk_usage("/")._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: left)
    with Store.open(sqlite_url) as store:
        [finding] = found(store, "disk")
    assert "5 MiB are left" in finding.message


def test_some_rollouts_are_enough_where_that_is_asked(store: Store, breaks: Breaks) -> None:
    for number in range(5):
        store.append(rollout_events(f"r{number}", at=time.time() - 9, task=str(number)))
    breaks("UPDATE turns SET prompt_tokens = 9 WHERE rollout_id = 'r3' AND parent_id IS NULL")
    assert look(store, max_rollouts=2).rollouts == 2
    chosen = look(store, selection=selection(task="3"))
    assert (chosen.rollouts, len(chosen.findings)) == (1, 1)
    other = look(store, selection=selection(task="2"))
    assert (other.rollouts, other.ok) == (1, True)


def test_many_findings_of_one_kind_are_counted() -> None:
    many = (
        Finding(check="a", message=str(n), fix="m", subject=str(n), broken=True) for n in range(25)
    )
    named = list(truncate_findings(many))
    assert [f.message for f in named] == [*map(str, range(10)), "15 more of these"]
    assert named[-1].count == 15
    assert named[-1].broken
