"""Leases never overlap, and hold all that a trainer needs of their rollouts."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from support.store.ledger_fixtures import FakeClock, fill, ids, lease, turn_ids
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.store.ledger_fixtures import ledger as ledger
from tracegrad.events import Outcome, Reward, RolloutFinished
from tracegrad.inspect.turn_standing import RewardStandings
from tracegrad.store import Ledger, Store, TurnCounts, lease_by_rollout
from tracegrad.store.read.training_samples import deciding_turn, turn_rewards


def test_a_lease_holds_the_oldest_groups_with_all_they_need(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=3, size=2, tags={"split": "train"})
    store.append([Reward(rollout_id="t0.1", value=0.25, turn=-1)])
    groups = lease(ledger, groups=2, tags={"split": "train"})
    assert [group.group_id for group in groups] == ["t0", "t1"]
    assert ids(groups) == [["t0.0", "t0.1"], ["t1.0", "t1.1"]]
    sample = groups[0].rollouts[1]
    assert (sample.task_id, sample.outcome, sample.reward) == ("t0", Outcome.COMPLETED, 1.0)
    assert sample.tags == {"split": "train"}
    assert sample.turn_rewards == {1: 0.25}
    assert sample.turns == store.rollout_turns("t0.1", raw=False)


def test_all_or_nothing_unless_fewer_will_do(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=5)
    assert lease(ledger, groups=3) == []
    assert store.turn_counts().pending == {"waiting": 10}, "nothing was held back"
    groups = lease(ledger, groups=3, at_least=1)
    assert ids(groups) == [["t0.0", "t0.1"], ["t0.2", "t0.3"]], "one task may fill several"
    assert lease(ledger, groups=1, at_least=0) == []


def test_what_is_not_ready_is_not_leased(store: Store, ledger: Ledger) -> None:
    unready: dict[str, dict[str, Any]] = {
        "open": {"tags": {"split": "train"}, "outcome": None},
        "unrewarded": {"tags": {"split": "train"}, "reward": None},
        "failed": {"tags": {"split": "train"}, "outcome": Outcome.INFRA_ERROR},
        "other": {"tags": {"split": "held_out"}},
    }
    for name, more in unready.items():
        for n in range(2):
            store.append(rollout_events(f"{name}{n}", task=name, **more))
    assert lease(ledger, tags={"split": "train"}) == []
    assert ledger.ready({"split": "train"}) == 0
    store.append([Reward(rollout_id=f"unrewarded{n}", value=0.0) for n in range(2)])
    assert ledger.ready({"split": "train"}) == 2
    assert ids(lease(ledger, tags={"split": "train"})) == [["unrewarded0", "unrewarded1"]]
    assert ledger.ready({"split": "train"}) == 0, "leased"


def test_scored_failures_are_leased_and_unscored_ones_consumed_with_their_outcome(
    store: Store, ledger: Ledger
) -> None:
    store.append(rollout_events("a", outcome=Outcome.ENV_ERROR))
    store.append(rollout_events("b", outcome=Outcome.ABORTED, turns=1))
    store.append(rollout_events("c", outcome=Outcome.ABORTED, tags={"split": "other"}, turns=3))
    assert store.turn_counts().pending == {"env_error": 2, "aborted": 4}
    assert lease(ledger) == []
    assert store.turn_counts() == TurnCounts(6, 0, {"env_error": 2, "aborted": 4}, {})
    assert store.rollout("a").summary.state == "consumed"
    scored = [Outcome.AGENT_ERROR, Outcome.BUDGET]
    for outcome in scored:
        store.append(rollout_events(outcome.value, outcome=outcome, reward=0.0))
    assert [rollout.outcome for rollout in lease(ledger)[0].rollouts] == scored


def test_an_incomplete_group_waits_then_goes_smaller(store: Store, ledger: Ledger) -> None:
    now = time.time()
    for n in range(3):
        store.append(rollout_events(f"r{n}", at=now - 11 + n))
    store.append(rollout_events("lonely", task="alone", at=now - 1000))
    assert lease(ledger, size=4, incomplete_after_s=60) == []
    assert ids(lease(ledger, size=4, incomplete_after_s=5)) == [["r0", "r1", "r2"]]
    assert lease(ledger, size=4, incomplete_after_s=5) == [], "one rollout is no group"


def test_an_incomplete_group_waits_from_its_last_rollout_on(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    for n, age_s in enumerate((500, 50)):
        store.append(rollout_events(f"r{n}", at=fake_clock.now - age_s))
    assert lease(ledger, size=4, incomplete_after_s=60) == []
    fake_clock.advance(20)
    assert ids(lease(ledger, size=4, incomplete_after_s=60)) == [["r0", "r1"]]


def test_a_rollout_without_a_task_is_a_group_of_one(store: Store, ledger: Ledger) -> None:
    store.append(rollout_events("solo", task=None))
    store.append(rollout_events("duo", task=None))
    assert lease(ledger, size=2, incomplete_after_s=0) == []
    assert [group.group_id for group in lease(ledger, groups=2, size=1)] == ["duo", "solo"]


def test_a_lease_ends_by_itself_or_by_release(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=1, size=2)
    first = lease(ledger, ttl_s=60)
    assert first
    fake_clock.advance(59)
    assert lease(ledger) == []
    fake_clock.advance(1)
    second = lease(ledger)
    assert ids(second) == ids(first)
    ledger.release(first)
    assert lease(ledger) == [], "an expired lease cannot free its successor's"
    ledger.release(second)
    assert ids(lease(ledger)) == ids(first)


def test_a_leases_history_names_who_had_what(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=1, size=2)
    before = fake_clock.now
    fake_clock.advance(1)
    [first] = lease(ledger, owner="a", ttl_s=5)
    fake_clock.advance(6)
    [second] = lease(ledger, owner="b")
    fake_clock.advance(1)
    ledger.release([first])  # too late: it is not a's any more
    ledger.release([second])
    ledger.release([second])
    fake_clock.advance(1)
    [third] = lease(ledger, owner="c")
    fake_clock.advance(1)
    fates = dict.fromkeys(turn_ids(third), "stale")
    ledger.commit_skipped(fates, ids([third])[0], lease_by_rollout([third]))
    ledger.release([third])
    fake_clock.advance(1)
    after = fake_clock.now
    for name in ("t0.0", "t0.1"):
        history = ledger.leases(name)
        assert [(one.lease_id, one.owner) for one in history] == [
            (first.lease_id, "a"), (second.lease_id, "b"), (third.lease_id, "c")
        ]  # fmt: skip
        assert [one.state(after) for one in history] == ["expired", "released", "released"]
        expired, released, consumed = history
        assert before < expired.leased_at < expired.leased_until == first.expires_at
        assert expired.released_at is None
        assert released.leased_at < (released.released_at or 0) < consumed.leased_at
        assert consumed.leased_at < (consumed.released_at or 0) < after
    assert store.rollout("t0.0").summary.state == "consumed", (
        "giving it back does not open it again"
    )
    assert ledger.leases("nobody") == []


def test_a_lease_that_is_held_says_so(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    assert lease(ledger, groups=2) == []
    assert ledger.leases("t0.0") == [], "what was not given has no history"
    lease(ledger, ttl_s=60)
    [held] = ledger.leases("t0.0")
    assert held.state(time.time()) == "held"
    assert held.state(held.leased_until) == "expired"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"groups": 0}, "groups"), ({"size": 0}, "group_size"), ({"ttl_s": 0.0}, "ttl_s")],
)
def test_a_wrong_request_names_its_field(ledger: Ledger, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        lease(ledger, **wrong)


THREE = [make_turn(f"t{number}") for number in range(3)]


def test_turn_rewards_resolve_and_revise() -> None:
    def given(value: float, turn: int | None, at: float, name: str = "reward") -> Reward:
        return Reward(rollout_id="r", value=value, turn=turn, created_at=at, name=name)

    events = [
        given(1, 0, 5),
        given(2, -3, 6),  # the same turn, counted from the end
        given(3, 0, 4),  # the last to arrive, whatever time it states
        given(4, 2, 1),
        given(5, -1, 1),
        given(1e308, -1, 9),  # of an old store: it would be refused today
        given(6, 3, 9),
        given(7, -4, 9),
        given(8, None, 9),
        given(9, 1, 9, "format"),
    ]
    assert turn_rewards(events, THREE) == {0: 3, 2: 5}


def test_a_turn_that_its_client_never_got_is_not_counted_by_rewards(store: Store) -> None:
    """The client was refused and asked again: of four stored turns the agent knows three."""
    first, refused, retry, last = [make_turn(f"t{number}") for number in range(4)]
    store.append([first, refused])
    assert store.mark_unacknowledged(["t1"]) == 1
    ended = RolloutFinished(rollout_id="r", outcome=Outcome.COMPLETED)
    given = [
        Reward(rollout_id="r", value=1.0),
        Reward(rollout_id="r", value=0.1, turn=0),
        Reward(rollout_id="r", value=0.2, turn=1),
        Reward(rollout_id="r", value=0.3, turn=-1),
        Reward(rollout_id="r", value=0.4, turn=3),  # which is not there
        Reward(rollout_id="r", value=1.0, turn=-2, name="deciding"),
    ]
    store.append([retry, last, *given, ended])
    [group] = Ledger(store).lease(groups=1, group_size=1, owner="me", ttl_s=60)
    [rollout] = group.rollouts
    assert rollout.turn_rewards == {0: 0.1, 2: 0.2, 3: 0.3}
    assert rollout.deciding_turn == 2
    detail = store.rollout("r")
    standings = RewardStandings(detail)
    shown = [[r.value for r in standings.of_turn(index)] for index in range(4)]
    assert shown == [[0.1], [], [0.2, 1.0], [0.3]]


def test_the_deciding_turn_is_the_last_one_that_is_marked() -> None:
    def marked(turn: int | None, value: float = 1.0, name: str = "deciding") -> Reward:
        return Reward(rollout_id="r", value=value, turn=turn, name=name)

    assert deciding_turn([], THREE) is None
    assert deciding_turn([marked(None), marked(2, name="reward"), marked(7)], THREE) is None
    assert deciding_turn([marked(0), marked(-2)], THREE) == 1
    assert deciding_turn([marked(0), marked(1), marked(1, 0.0)], THREE) == 0, "a mark taken back"


def test_finish_without_an_opening_can_be_trained(store: Store, ledger: Ledger) -> None:
    store.append([make_turn("t", "r"), Reward(rollout_id="r", value=math.pi)])
    store.append([RolloutFinished(rollout_id="r")])
    assert ids(lease(ledger, size=1)) == [["r"]]


def test_leases_of_an_owner_who_was_killed_are_free_at_once(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=4, size=1)
    first = lease(ledger, groups=2, size=1, owner="killed")
    lease(ledger, groups=1, size=1, owner="alive")
    assert ledger.release_owner("killed") == 2
    assert ledger.release_owner("killed") == 0
    assert ids(lease(ledger, groups=2, size=1, owner="next")) == ids(first)
    assert [one.state(time.time()) for one in ledger.leases("t0.0")] == ["released", "held"]


def test_rollouts_of_whose_worth_nobody_said_anything(store: Store) -> None:
    crash = {"outcome": Outcome.AGENT_ERROR, "reward": None}
    store.append(rollout_events("old", **crash, at=1000.0))
    store.append(rollout_events("new", **crash, at=2000.0, tags={"split": "train"}))
    store.append(rollout_events("scored", outcome=Outcome.AGENT_ERROR, reward=0.0))
    store.append(rollout_events("fine", reward=None))
    store.append(rollout_events("silent", **crash, turns=0))
    store.append(
        [
            *rollout_events("back", **crash),
            Reward(rollout_id="back", value=1.0),
            Reward(rollout_id="back", value=None),
        ]
    )
    store.append([*rollout_events("turns", **crash), Reward(rollout_id="turns", value=1.0, turn=0)])
    ledger = Ledger(store)
    crashed = Outcome.AGENT_ERROR
    assert ledger.unrewarded(crashed) == ["old", "turns", "new"]
    assert ledger.unrewarded(crashed, tags={"split": "train"}) == ["new"]
    # A crash of a candidate's is one that the gate must see, whatever else training selects.
    store.append(rollout_events("tagged", **crash, at=3000.0, tags={"split": "held_out"}))
    store.append(rollout_events("marked", **crash, at=4000.0, held_out=True))
    only = {"tags": {"split": "train"}}
    assert ledger.unrewarded(crashed, **only) == ["new", "marked"]
    held_out = {"split": "held_out"}
    assert ledger.unrewarded(crashed, **only, held_out=held_out) == ["new", "tagged", "marked"]
    assert ledger.unrewarded(crashed, after_s=time.time()) == []
    assert ledger.unrewarded(Outcome.COMPLETED) == ["fine"]


def test_a_turns_reward_that_was_taken_back_is_none(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    given = [(0, 1.0), (1, 0.5), (0, None), (-1, 0.75)]
    store.append([Reward(rollout_id="t0.1", value=value, turn=turn) for turn, value in given])
    [group] = lease(ledger, groups=1)
    assert [rollout.turn_rewards for rollout in group.rollouts] == [{}, {1: 0.75}]
