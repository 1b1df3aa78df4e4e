"""What a trainer has leased stays its own while it lives; what it lost it lets go, whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.proxy.servers import eventually
from support.store.ledger_fixtures import FakeClock
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.system.log_lines import our_lines
from support.trainer.step_samples import fill, trainer_settings
from tracegrad.store import Group, LeaseLost, Ledger, LedgerError, Store, lease_by_rollout
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.rl import train_loop as training_module
from tracegrad_trainer.rl.coordinator import Coordinator, RolloutSupply
from tracegrad_trainer.rl.lease_renewal import HeldLeases
from tracegrad_trainer.rl.train_loop import TrainLoop

OFFLINE = RolloutSupply(is_open=False)
TTL_S = 1800.0
PATIENCE_S = 60.0  # for what comes at once on a machine that is not overloaded


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return trainer_settings(tmp_path, data={"lease_ttl_s": TTL_S})


@pytest.fixture
def store(settings: TrainerSettings) -> Iterator[Store]:
    with Store.open(settings.proxy.store) as opened:
        yield opened


@pytest.fixture
def coordinator(settings: TrainerSettings, store: Store) -> Iterator[Coordinator]:
    made = Coordinator(settings, store, stopping=lambda: False, supply=OFFLINE)
    yield made
    made.leases.close()


def stolen(store: Store, groups: int = 1) -> list[Group]:
    """By a trainer of another folder."""
    return Ledger(store).lease(
        groups=groups, group_size=2, owner="thief", ttl_s=TTL_S, at_least=1, expert_routing=False
    )


def names(groups: list[Group]) -> set[str]:
    return {rollout.rollout_id for group in groups for rollout in group.rollouts}


# Renewal in the background


def pass_time(fake: FakeClock, store: Store, rollout_id: str, seconds: float) -> None:
    """In pieces that a lease outlives, each only after the one before was renewed."""
    ledger = Ledger(store)
    end = fake.now + seconds
    while fake.now < end:
        fake.advance(TTL_S / 2)
        eventually(
            lambda: ledger.leases(rollout_id)[-1].leased_until == fake.now + TTL_S, PATIENCE_S
        )


def test_what_is_held_is_renewed_until_it_is_let_go_or_the_holder_ends(
    store: Store, fake_clock: FakeClock
) -> None:
    fill(store, 2)
    ledger = Ledger(store)
    groups = ledger.lease(groups=2, group_size=2, owner="me", ttl_s=TTL_S)
    held = HeldLeases(ledger, TTL_S, every_s=0.01)
    held.hold(groups)
    pass_time(fake_clock, store, "t0r0", 4 * TTL_S)
    assert stolen(store) == []
    held.drop(groups[1:])
    assert held.rollouts == names(groups[:1])
    pass_time(fake_clock, store, "t0r0", 2 * TTL_S)
    assert names(stolen(store)) == names(groups[1:]), "let go, and not renewed any more"
    held.close()
    fake_clock.advance(TTL_S + 1)
    assert names(stolen(store)) == names(groups[:1]), "a dead holder's leases end"


def test_renewal_goes_on_after_the_store_was_away(
    store: Store, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    fill(store, 1)
    ledger = Ledger(store)
    groups = ledger.lease(groups=1, group_size=2, owner="me", ttl_s=TTL_S)
    held = HeldLeases(ledger, TTL_S, every_s=0.01)
    held.hold(groups)
    for times in (1, 2):
        tried = threading.Semaphore(0)

        def away(*_: object, tried: threading.Semaphore = tried, **__: object) -> Any:
            tried.release()
            raise LedgerError("store: locked")

        with monkeypatch.context() as broken:
            broken.setattr(ledger, "renew", away)
            for _ in range(3):
                assert tried.acquire(timeout=PATIENCE_S)
        pass_time(fake_clock, store, "t0r0", 2 * TTL_S)
        assert caplog.text.count("leases cannot be renewed; trying again") == times
    held.close()


# The coordinator


def test_groups_that_are_held_for_a_refill_are_not_leased_into_the_same_batch(
    tmp_path: Path, fake_clock: FakeClock
) -> None:
    """Their lease ran out while the batch waited for more."""
    settings = trainer_settings(tmp_path, data={"lease_ttl_s": TTL_S, "refill": True})
    with Store.open(settings.proxy.store) as store:
        supply = RolloutSupply(patience_s=0.0)
        coordinator = Coordinator(settings, store, stopping=lambda: False, supply=supply)
        fill(store, 1)
        assert coordinator.next_batch(0) is None
        fake_clock.advance(TTL_S + 1)
        coordinator._held += coordinator._lease()
        coordinator._held += coordinator._lease()
        fill(store, 3, first=1)
        batch = coordinator.next_batch(0)
        assert batch is not None
        groups = batch.groups
        assert len(names(groups)) == sum(len(group.rollouts) for group in groups)
        made = coordinator.record(batch, step=1, version=1, metrics={}, dropped_rows=[], weights=0)
        coordinator.commit([made], batch.groups)
        coordinator.leases.close()


def test_groups_that_were_lost_are_left_out_of_the_batch_with_one_line(
    coordinator: Coordinator,
    store: Store,
    fake_clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(store, 3)
    coordinator._held = coordinator._lease()
    fake_clock.advance(TTL_S + 1)  # it was suspended, and renewed nothing
    [theirs] = stolen(store)
    batch = coordinator.next_batch(0)
    assert batch is not None
    assert [group.group_id for group in batch.groups] == ["t1", "t2"]
    [line] = our_lines(caplog)
    assert line.startswith("1 of 2 groups are left out of the batch: rollout t0r0 is no longer ")
    assert line.endswith("thief has it now")
    assert coordinator.leases.rollouts == names(batch.groups)
    assert store.rollout("t0r0").summary.state == "leased"
    assert theirs.group_id == "t0"


def test_a_batch_of_which_nothing_can_be_trained_is_left_to_whom_it_is(
    coordinator: Coordinator,
    store: Store,
    fake_clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(store, 2)
    batch = coordinator.next_batch(0)
    assert batch is not None
    fake_clock.advance(TTL_S + 1)
    stolen(store)
    coordinator.discard_batch(batch, "non_finite_step")
    assert "thief has it now" in caplog.text
    assert store.turn_counts().skipped == {}
    assert coordinator.leases.rollouts == set()
    assert Ledger(store).ready() == 2, "what was ours of it is free"


# A step


@pytest.fixture
def one_rank(settings: TrainerSettings, store: Store) -> Iterator[TrainLoop]:
    """That has leased a batch of two groups of three."""
    fill(store, 3)
    with ExitStack() as stack:
        training = TrainLoop(settings, stack, stopping=lambda: False, supply=OFFLINE)
        assert training.coordinator is not None
        training.coordinator.leases = HeldLeases(training.coordinator.ledger, TTL_S, every_s=0.01)
        training.resume()
        assert training.next_action() == "train"
        yield training


def test_a_step_longer_than_its_lease_is_committed(
    one_rank: TrainLoop, store: Store, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_batch = training_module.train_batch
    tried: list[list[Group]] = []

    def slow(*args: Any, **more: Any) -> Any:
        pass_time(fake_clock, store, "t0r0", 3 * TTL_S)
        tried.append(stolen(store, 2))
        return train_batch(*args, **more)

    monkeypatch.setattr(training_module, "train_batch", slow)
    assert one_rank.train_batch()
    # Pending: nor is it leased to ourselves, into the next batch.
    pass_time(fake_clock, store, "t0r0", 2 * TTL_S)
    assert one_rank.next_action() == "train"
    assert one_rank.batch is not None
    one_rank.commit_pending()
    assert [names(groups) for groups in tried] == [{"t2r0", "t2r1"}]
    [step] = Ledger(store).steps()
    assert step.step == 1
    assert store.turn_counts().trained == 12


def test_a_step_whose_batch_was_lost_is_given_up_before_anything_of_it_is_written(
    one_rank: TrainLoop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_batch = training_module.train_batch

    def suspended(*args: Any, **more: Any) -> Any:
        assert one_rank.batch is not None
        Ledger(store).release(one_rank.batch.groups)  # as `tracegrad doctor --fix` does
        stolen(store)
        return train_batch(*args, **more)

    monkeypatch.setattr(training_module, "train_batch", suspended)
    with pytest.raises(LeaseLost, match=r"thief has it now; nothing of the step is kept"):
        one_rank.train_batch()
    assert not one_rank.settings.checkpoints.exists()
    assert Ledger(store).steps() == []
    assert store.turn_counts().trained == 0


def test_a_step_that_the_ledger_refuses_leaves_no_checkpoint(
    one_rank: TrainLoop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = CheckpointSaver.start

    def lost(self: CheckpointSaver, *args: Any, **more: Any) -> Path:
        """After the check, before the commit."""
        assert one_rank.batch is not None
        Ledger(store).release(one_rank.batch.groups)
        stolen(store)
        return start(self, *args, **more)

    monkeypatch.setattr(CheckpointSaver, "start", lost)
    assert one_rank.train_batch()
    with pytest.raises(
        LeaseLost, match=r"thief has it now.*; this run's step 1 is given up"
    ) as error:
        one_rank.commit_pending()
    assert "\n" not in str(error.value)
    assert list(one_rank.settings.checkpoints.iterdir()) == []
    assert Ledger(store).steps() == []


def test_leases_of_groups_are_their_rollouts(store: Store) -> None:
    fill(store, 1)
    [group] = stolen(store)
    assert lease_by_rollout([group]) == {"t0r0": group.lease_id, "t0r1": group.lease_id}
