"""When things happened: the reward that counts, the lease that trained, calls in their order."""

from __future__ import annotations

from support.cli.timed_rollouts import BEGAN, OLD, TRAINED, WAITS, timed_samples
from support.store.events import make_turn
from tracegrad.events import Reward, RolloutStarted, Span
from tracegrad.store import Ledger, RolloutFilter, Store
from tracegrad.store.read.rollout_moments import RolloutMoments, find_moments, load_moments


def moments_of(store: Store, rollout_id: str) -> RolloutMoments:
    with store.reading() as connection:
        [found] = load_moments(connection, [rollout_id])
    return found


def test_of_a_trained_rollout(store: Store) -> None:
    timed_samples(store)
    found = moments_of(store, TRAINED)
    assert found.opened_at == BEGAN
    assert found.rewarded_at == BEGAN + 21.5
    assert found.finished_at == BEGAN + 22
    assert found.leased_at == BEGAN + 30
    assert found.consumed_at == BEGAN + 41
    assert [turn.turn_id for turn in found.turns] == ["a", "b", "c", "d"]
    assert found.turns[3].timing is not None
    assert found.turns[3].timing["commits"] == {"b": 0.005, "c": 0.02}
    assert moments_of(store, OLD).turns[0].timing is None


def test_the_newest_first_as_filters_choose(store: Store) -> None:
    timed_samples(store)
    with store.reading() as connection:
        every = find_moments(connection, RolloutFilter(), limit=None)
        some = find_moments(connection, RolloutFilter(task="mend-the-cart"), limit=1)
        assert load_moments(connection, ["nobody"]) == []
    assert [each.rollout_id for each in every] == [WAITS, TRAINED, OLD]
    assert [each.rollout_id for each in some] == [WAITS]


def test_the_reward_that_counts_is_the_last_that_its_lease_saw(store: Store) -> None:
    def reward(value: float | None, at: float, name: str = "reward") -> None:
        store.append([Reward(rollout_id="r", value=value, name=name, created_at=at)])

    store.append([RolloutStarted(rollout_id="r", task_id="t", opened_at=1.0), make_turn("t0")])
    assert moments_of(store, "r").rewarded_at is None
    reward(1.0, 10.0)
    reward(0.5, 11.0)
    reward(0.5, 12.0, name="format")
    store.append([Reward(rollout_id="r", value=0.5, turn=0, created_at=13.0)])
    assert moments_of(store, "r").rewarded_at == 11.0
    reward(None, 14.0)
    assert moments_of(store, "r").rewarded_at is None, "it was taken back"


def test_a_lease_that_nothing_came_of_ends_no_wait(store: Store) -> None:
    timed_samples(store)
    assert [lease.state(0.0) for lease in Ledger(store).leases(OLD)] == ["held"]
    assert moments_of(store, OLD).leased_at is None


def test_spans_of_tools_are_known_by_any_convention(store: Store) -> None:
    kinds: list[dict[str, object]] = [
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"},
        {"openinference.span.kind": "TOOL"},
        {"traceloop.span.kind": "tool"},
        {"gen_ai.operation.name": "invoke_agent"},
        {"openinference.span.kind": "AGENT", "tool": 1},
        {},
    ]
    store.append(
        [
            RolloutStarted(rollout_id="r"),
            *(
                Span(
                    trace_id="0" * 31 + "1",
                    span_id=f"{number + 1:016x}",
                    rollout_id="r",
                    name="x",
                    start_ns=number * 10**9,
                    end_ns=number * 10**9 + 500_000_000,
                    attributes=attributes,
                )
                for number, attributes in enumerate(kinds)
            ),
        ]
    )
    assert sorted(moments_of(store, "r").tools) == [(0.0, 0.5), (1.0, 1.5), (2.0, 2.5)]
