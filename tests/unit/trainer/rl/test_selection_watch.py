"""A selection that fits nothing spends no rollouts, holds up nobody, and is said."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.store.events import rollout_events
from support.trainer.step_samples import rollout, trainer_settings
from tracegrad.events import Event, Turn
from tracegrad.store import Store
from tracegrad.store.ledger.intake import Intake
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_state import read_state
from tracegrad_trainer.rl.coordinator import Coordinator, LeasedBatch, RolloutSupply
from tracegrad_trainer.rl.selection_watch import FIRST_WAIT_S, LONGEST_WAIT_S
from tracegrad_trainer.rl.train_loop import TrainLoop

Make = Callable[..., Coordinator]
OFFLINE, AT_ONCE = RolloutSupply(is_open=False), RolloutSupply(patience_s=0.0)
WRITTER = {"agents": ["writter"]}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A coordinator on the store of `tmp_path`, for batches of one group of two."""
    with ExitStack() as stack:

        def coordinator(
            batches: dict[str, Any], supply: RolloutSupply = AT_ONCE, **changes: Any
        ) -> Coordinator:
            every = {"groups": 1, "group_size": 2, "tokens_per_micro_batch": 64, **batches}
            settings = trainer_settings(tmp_path, batches=every, **changes)
            store = stack.enter_context(Store.open(settings.proxy.store))
            made = Coordinator(settings, store, stopping=lambda: False, supply=supply)
            made.owner = f"{made.owner} {id(made)}"
            stack.callback(made.close)
            return made

        yield coordinator


def group(task: str, agent: str | None, *, at: float = 1000.0) -> list[Event]:
    """Two rollouts of different rewards, all of whose turns one agent made."""
    events = [
        event
        for n in range(2)
        for event in rollout_events(f"{task}.{n}", task=task, reward=float(n), at=at)
    ]
    return [replace(one, agent_name=agent) if isinstance(one, Turn) else one for one in events]


def groups_of(batch: LeasedBatch | None) -> list[str] | None:
    return None if batch is None else [each.group_id for each in batch.groups]


def leases(coordinator: Coordinator, rollout_id: str) -> int:
    return len(coordinator.ledger.leases(rollout_id))


def test_nothing_is_spent_on_a_pattern_that_fits_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = make(WRITTER)
    coordinator.store.append(group("a", "writer"))
    assert [coordinator.next_batch(0) for _ in range(3)] == [None] * 3
    counts = coordinator.store.turn_counts()
    assert (counts.skipped, counts.pending) == ({}, {"waiting": 4})
    assert leases(coordinator, "a.0") == 1, "it is not leased again and again"
    line = "batches.agents = 'writter' fits no turn; there are: 'writer'"
    assert [record.getMessage() for record in caplog.records] == [line]
    assert coordinator.selection.report() == {
        "unmatched": {"batches.agents = 'writter'": line},
        "given_back": "2 rollouts are given back: nothing fits batches.agents so far; training goes"
        " on with the first turn that does (or start again with other patterns)",
    }
    with_the_right_name = make({"agents": ["writer"]})
    assert groups_of(with_the_right_name.next_batch(0)) == ["a"]


def test_it_goes_on_by_itself_with_the_first_turn_that_fits(make: Make) -> None:
    coordinator = make({"agents": ["writer"]})
    store = coordinator.store
    store.append(group("a", "planner"))
    assert coordinator.next_batch(0) is None
    store.append(group("b", "planner", at=1010.0))
    assert coordinator.next_batch(0) is None, "others are looked at meanwhile"
    assert coordinator.selection.groups == 2
    store.append(group("c", "writer", at=1020.0))
    batch = coordinator.next_batch(0)
    assert groups_of(batch) == ["c"]
    assert coordinator.selection.report() == {"unmatched": {}, "given_back": None}
    assert coordinator.next_batch(0) is None
    assert store.turn_counts().skipped == {"turn_not_selected": 8}, "as any that is not selected"


def test_what_was_given_back_is_looked_at_again_later_and_then_less_often(make: Make) -> None:
    """Spans may come late."""
    coordinator = make(WRITTER)
    clock = coordinator.selection._clock = Clock()
    coordinator.store.append([*group("a", "writer"), *group("b", "writer", at=1010.0)])
    seen = []
    for clock.now in (0.0, 0.1, FIRST_WAIT_S - 0.1, FIRST_WAIT_S, *(2.9 * FIRST_WAIT_S,) * 2):
        assert coordinator.next_batch(0) is None
        seen.append((leases(coordinator, "a.0"), leases(coordinator, "b.0")))
    assert seen == [(1, 0), (1, 1), (1, 1), (2, 1), (2, 2), (2, 2)]
    clock.now = 3 * FIRST_WAIT_S
    assert coordinator.next_batch(0) is None
    assert leases(coordinator, "a.0") == 3, "twice as long after the second look"


def test_the_longest_wait_is_reached_and_kept(make: Make) -> None:
    coordinator = make(WRITTER)
    clock = coordinator.selection._clock = Clock()
    coordinator.store.append(group("a", "writer"))
    waits = []
    for _ in range(9):
        assert coordinator.next_batch(0) is None
        waits.append(coordinator.selection._again_at - clock.now)
        clock.now = coordinator.selection._again_at
    assert waits == [FIRST_WAIT_S * 2**n for n in range(7)] + [LONGEST_WAIT_S] * 2


@pytest.mark.parametrize(
    ("batches", "fate"),
    [
        ({"agents": ["writter", "editr"]}, "waiting"),
        ({"agents": ["planner"], "span_paths": ["*/writer"]}, "waiting"),
        ({"agents": ["!planner"]}, "turn_not_selected"),  # it leaves out what is there
        ({"agents": ["planner"], "models": ["!m"]}, "turn_not_selected"),
        ({"agents": ["planner", "writter"], "models": ["!m"]}, "turn_not_selected"),
        ({"agents": ["!plannr"], "models": ["m"]}, "trained"),
        ({"agents": ["planner", "writter"]}, "trained"),
    ],
)
def test_a_batch_is_given_back_only_where_no_pattern_of_a_setting_fits(
    make: Make, batches: dict[str, Any], fate: str
) -> None:
    coordinator = make(batches)
    coordinator.store.append(group("a", "planner"))
    batch = coordinator.next_batch(0)
    assert coordinator.selection.groups == (fate == "waiting")
    assert (batch is not None) == (fate == "trained")
    if batch is None:
        counts = coordinator.store.turn_counts()
        assert counts.pending | counts.skipped == {fate: 4}


def test_where_no_more_are_to_come_the_others_are_trained_and_the_rest_is_left(
    make: Make,
) -> None:
    coordinator = make({"agents": ["writer"]}, OFFLINE)
    clock = coordinator.selection._clock = Clock()
    coordinator.store.append([*group("a", "planner"), *group("b", "writer", at=1010.0)])
    assert groups_of(coordinator.next_batch(0)) == ["b"]
    again = make(WRITTER, OFFLINE)
    clock.now = 1e9
    assert again.next_batch(0) is None
    assert again.explain_no_batch() == (
        "nothing more to train: of 8 turns 0 trained, 8 waiting (4 given back, since the selection"
        " fits none, 4 leased)"
    )


def test_drivers_may_open_others_in_place_of_what_was_given_back(make: Make) -> None:
    coordinator = make({"agents": ["writer"]}, data={"in_flight": 2})
    coordinator.report_served(0, [], stepped=False)
    coordinator.store.append(group("a", "planner", at=time.time()))
    intake = Intake(coordinator.store)
    assert intake.state().reason == "data.in_flight = 2: 0 open, 2 waiting to be trained"
    assert coordinator.next_batch(0) is None
    assert (intake.state().reason, intake.state().capacity.rollouts) == ("", 2)


# As the run says it


def said_by_ranks(settings: TrainerSettings) -> dict[str, Any]:
    state = read_state(settings.state_dir, "ranks")
    assert state is not None
    return {name: state[name] for name in ("stage", "unmatched", "given_back")}


def test_ranks_say_it_in_their_state(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path, batches={"groups": 1, "group_size": 2, **WRITTER})
    with Store.open(settings.proxy.store) as store:
        for n in range(2):
            store.append(rollout(f"r{n}", "t", reward=float(n), seed=n))
    with ExitStack() as stack:
        training = TrainLoop(settings, stack, stopping=lambda: False, supply=AT_ONCE)
        training.resume()
        assert training.next_action() == "idle"
        training.report_stage("waiting")
        found = said_by_ranks(settings)
    name = "batches.agents = 'writter'"
    assert found["unmatched"] == {name: f"{name} fits no turn; there are: none"}
    assert found["given_back"].startswith("2 rollouts are given back: nothing fits batches.agents")
