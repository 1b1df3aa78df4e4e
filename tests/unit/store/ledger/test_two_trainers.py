"""Two trainers on one store, in any order of what they may do: nothing is trained twice."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from support.store.events import rollout_events
from tracegrad.store import (
    AlreadyTrained,
    Group,
    LeaseLost,
    Ledger,
    LedgerError,
    StepRecord,
    Store,
    lease_by_rollout,
)
from tracegrad.store.databases import statements
from tracegrad.store.models import Rollouts, TurnLedger, Turns

TTL_S = 10.0
TASKS, SIZE = 4, 2
OWNERS = st.sampled_from(["a", "b"])


class Ledgers(RuleBasedStateMachine):
    """What each owner believes to have is in `groups`, whatever became of its leases."""

    groups = Bundle("groups")
    now = 0.0
    filled: Path  # a store that nobody has leased from

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        shutil.copy(self.filled, self.folder / "store.db")
        self.store = Store.open(f"sqlite:///{self.folder}/store.db")
        self.ledger = Ledger(self.store)
        self.trained: list[str] = []  # by committed steps
        self.held: dict[str, set[str]] = {"a": set(), "b": set()}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(target=groups, owner=OWNERS, count=st.integers(1, 3), heeds=st.booleans())
    def lease(self, owner: str, count: int, heeds: bool) -> Any:
        """`heeds`: it says what it holds itself, as the coordinator does."""
        found = self.ledger.lease(
            groups=count,
            group_size=SIZE,
            owner=owner,
            ttl_s=TTL_S,
            at_least=1,
            held=self.held[owner] if heeds else (),
        )
        names = [each.rollout_id for group in found for each in group.rollouts]
        assert len(names) == len(set(names))
        assert not heeds or not self.held[owner] & set(names)
        self.held[owner] |= set(names)
        return multiple(*((owner, group) for group in found))

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        Ledgers.now += seconds

    @rule(one=groups)
    def renew(self, one: tuple[str, Group]) -> None:
        leases = lease_by_rollout([one[1]])
        lost = {each.rollout_id for each in self.ledger.renew(leases, ttl_s=TTL_S)}
        mine = {name for name, lease in self._leases().items() if lease == one[1].lease_id}
        assert lost.isdisjoint(mine)
        assert leases.keys() - lost <= mine, "what is not lost is held"

    @rule(one=groups)
    def release(self, one: tuple[str, Group]) -> None:
        self.ledger.release([one[1]])

    @rule(owner=OWNERS)
    def restart(self, owner: str) -> None:
        self.ledger.release_owner(owner)
        self.held[owner] = set()

    @rule(batch=st.lists(groups, min_size=1, max_size=3), skip=st.booleans())
    def commit(self, batch: list[tuple[str, Group]], skip: bool) -> None:
        """Whoever they were given to, and however long ago."""
        given = [group for _, group in batch]
        rollouts = [each.rollout_id for group in given for each in group.rollouts]
        turns = [turn.turn_id for g in given for r in g.rollouts for turn in r.turns]
        stored = self._leases()
        ours = all(stored.get(name) == lease_by_rollout(given)[name] for name in rollouts)
        whole = len(set(rollouts)) == len(rollouts)
        before = self._ledger()
        last = self.ledger.last_step()
        number = last.step + 1 if last else 1
        try:
            if skip:
                skipped = dict.fromkeys(turns, "stale")
                self.ledger.commit_skipped(skipped, rollouts, lease_by_rollout(given))
            else:
                step = StepRecord(step=number, version=number)
                self.ledger.commit_step(
                    step,
                    trained=turns,
                    skipped={},
                    rollouts=rollouts,
                    leases=lease_by_rollout(given),
                )
        except (AlreadyTrained, LeaseLost, LedgerError):
            assert not (ours and whole), "a holder's commit is never refused"
            assert self._ledger() == before, "nothing of it is stored"
        else:
            assert ours
            assert whole
            self.trained += [] if skip else turns
            for held in self.held.values():
                held -= set(rollouts)

    @invariant()
    def trained_once(self) -> None:
        assert len(self.trained) == len(set(self.trained))
        rows = self._ledger()
        assert {turn for turn, step in rows.items() if step is not None} == set(self.trained)

    @invariant()
    def a_rollout_is_consumed_whole(self) -> None:
        query = select(Turns.turn_id).join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
        with self.store.reading() as connection:
            consumed = set(connection.scalars(query.where(Rollouts.consumed_at.is_not(None))))
        assert consumed == self._ledger().keys()

    def _ledger(self) -> dict[str, int | None]:
        with self.store.reading() as connection:
            rows = connection.execute(select(TurnLedger.turn_id, TurnLedger.step))
            return {row.turn_id: row.step for row in rows}

    def _leases(self) -> dict[str, str]:
        """Rollout -> lease, of those that are not consumed."""
        query = select(Rollouts.rollout_id, Rollouts.lease_id).where(
            Rollouts.consumed_at.is_(None), Rollouts.lease_id.is_not(None)
        )
        with self.store.reading() as connection:
            return {name: str(lease) for name, lease in connection.execute(query)}


def test_two_trainers_in_any_order_train_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledgers.filled = tmp_path / "store.db"
    with Store.open(f"sqlite:///{Ledgers.filled}") as store:
        for task in range(TASKS):
            for n in range(SIZE):
                store.append(rollout_events(f"t{task}.{n}", task=f"t{task}", turns=1))
    monkeypatch.setattr(statements, "server_time", lambda _connection: 1.8e9 + Ledgers.now)
    run_state_machine_as_test(
        Ledgers,
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
