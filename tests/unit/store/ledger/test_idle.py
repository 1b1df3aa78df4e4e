"""What nobody ends is closed when it was idle, opened again by what comes, and trained once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event, select

from support.store.events import chain, make_turn, rollout_events
from support.store.ledger_fixtures import FakeClock, commit, ids, lease
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.store.ledger_fixtures import ledger as ledger
from support.store.query_plans import uses_index
from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutInferred,
    RolloutStarted,
    Turn,
)
from tracegrad.store import Ledger, Store
from tracegrad.store.errors import RolloutTaken
from tracegrad.store.ledger import ledger as ledger_module
from tracegrad.store.ledger.idle import idle_query
from tracegrad.store.models import Rollouts
from tracegrad.store.read.rollouts import turn_counts
from tracegrad.store.types import InferredOpen

IDLE_S = 60.0


def calls(name: str, count: int, at: float, behind: Turn | None = None) -> list[Turn]:
    return chain(name, count, behind=behind, created_at=at)


def more(name: str, behind: Turn, at: float, turn_id: str | None = None) -> list[Event]:
    """A call that continues `behind` and names no rollout, as the proxy stores it."""
    turn = make_turn(turn_id or f"{name}.more", name, parent=behind, created_at=at)
    return [RolloutInferred(rollout_id=name), turn]


def state(store: Store, name: str) -> tuple[str, float | None]:
    row = store.rollout(name).summary
    return row.state, row.idle_s


@pytest.mark.parametrize(
    ("events", "closed"),
    [
        (lambda now: calls("r", 2, now - 61), True),
        (lambda now: calls("r", 2, now - 59), False),
        (lambda now: [*calls("r", 1, now - 500), *more("r", calls("r", 1, 0.0)[0], now)], False),
        (lambda now: calls("r", 2, now + 3600), False),  # the proxy's clock is ahead
        (lambda now: rollout_events("r", outcome=None, at=now - 500), False),
        (lambda now: rollout_events("r", at=now - 500), False),
        (lambda now: [Reward(rollout_id="r", value=1.0, created_at=now - 500)], False),
        (
            lambda now: [
                *calls("r", 1, now - 500),
                RolloutFinished(rollout_id="r", outcome=Outcome.ABORTED, finished_at=now - 400),
            ],
            False,
        ),
    ],
    ids=["idle", "not idle", "its newest call counts", "in the future", "opened by somebody",
         "ended", "no call", "ended by somebody"],
)  # fmt: skip
def test_what_is_closed(
    store: Store,
    ledger: Ledger,
    fake_clock: FakeClock,
    events: Callable[[float], list[Event]],
    closed: bool,
) -> None:
    store.append(events(fake_clock.now))
    before = store.rollout("r").summary
    assert ledger.close_idle(IDLE_S) == (["r"] if closed else [])
    after = store.rollout("r").summary
    if closed:
        assert (after.outcome, after.finished_at, after.idle_s) == (
            Outcome.COMPLETED,
            pytest.approx(fake_clock.now, abs=1e-3),
            IDLE_S,
        )
        assert store.outcomes("r") == [], "nobody reported it"
        assert ledger.close_idle(IDLE_S) == []
    else:
        assert after == before


def test_calls_in_the_future_are_idle_when_their_time_has_passed(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    store.append(calls("r", 1, fake_clock.now + 100))
    assert ledger.readiness(group_size=1).inferred_open.idle_for_s == pytest.approx(-100)
    fake_clock.advance(100 + IDLE_S - 1)
    assert ledger.close_idle(IDLE_S) == []
    fake_clock.advance(2)
    assert ledger.close_idle(IDLE_S) == ["r"]


def test_only_those_with_the_tags_are_closed(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    """Another trainer may want the others, and has an `idle_s` of its own."""
    store.append(calls("r", 1, fake_clock.now - 100))
    assert ledger.close_idle(IDLE_S, tags={"split": "train"}) == []
    assert ledger.close_idle(IDLE_S) == ["r"]


def test_many_are_closed_a_thousand_at_a_time(
    store: Store, ledger: Ledger, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "MOST_CLOSED", 3)
    store.append([turn for n in range(7) for turn in calls(f"r{n}", 1, fake_clock.now - 100)])
    found = [len(ledger.close_idle(IDLE_S)) for _ in range(4)]
    assert found == [3, 3, 1, 0]


def test_those_that_are_idle_are_found_in_an_index(store: Store) -> None:
    assert uses_index(store, idle_query({}, 0.0, 10))


def test_how_many_are_open_and_for_how_long(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    assert ledger.readiness(group_size=1).inferred_open == InferredOpen(rollouts=0, idle_for_s=None)
    store.append([*calls("a", 1, fake_clock.now - 12), *calls("b", 1, fake_clock.now - 3)])
    store.append(rollout_events("opened", outcome=None, at=fake_clock.now - 99))
    store.append([Reward(rollout_id="no-call", value=1.0)])
    found = ledger.readiness(group_size=1)
    assert found.inferred_open.rollouts == 2
    assert found.inferred_open.idle_for_s == pytest.approx(12)
    assert found.states["open"] == 4
    assert ledger.readiness(group_size=1, tags={"a": "b"}).inferred_open.rollouts == 0


def test_calls_without_a_name_are_counted_after_they_were_closed(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    """Somebody opened a rollout, and its agent called past it."""
    at = fake_clock.now - 100
    store.append([RolloutStarted(rollout_id="past", opened_at=at - 1)])
    made = f"{int(at * 1e3):012x}{'0' * 20}"  # as the proxy makes ids
    store.append(calls(made, 2, at))
    store.append([RolloutFinished(rollout_id="past", finished_at=at + 1)])
    before = store.count_calls(["past"])
    assert before[0].unnamed_calls == 2
    assert ledger.close_idle(IDLE_S) == [made]
    assert store.count_calls(["past"]) == before


# A call that comes after that


@pytest.fixture
def closed(store: Store, ledger: Ledger, fake_clock: FakeClock) -> list[Turn]:
    """The turns of rollout "r", which was closed, and has a reward."""
    turns = calls("r", 2, fake_clock.now - 100)
    store.append([*turns, Reward(rollout_id="r", value=1.0)])
    assert ledger.close_idle(IDLE_S) == ["r"]
    return turns


def test_a_call_before_the_lease_opens_it_again(
    store: Store, ledger: Ledger, fake_clock: FakeClock, closed: list[Turn]
) -> None:
    store.append(more("r", closed[-1], fake_clock.now))
    row = store.rollout("r").summary
    assert (row.state, row.outcome, row.finished_at, row.idle_s) == ("open", None, None, None)
    assert lease(ledger, size=1) == []
    fake_clock.advance(IDLE_S + 1)
    assert ledger.close_idle(IDLE_S) == ["r"], "and it closes again"
    [group] = lease(ledger, size=1)
    assert len(group.rollouts[0].turns) == 3
    commit(ledger, [group])
    assert turn_counts_of(store) == (3, {}, {})


def test_a_turn_that_is_sent_again_opens_nothing(store: Store, closed: list[Turn]) -> None:
    store.append([RolloutInferred(rollout_id="r"), *closed])
    assert state(store, "r") == ("no_task", IDLE_S)


def test_a_lease_that_was_given_back_is_none(
    store: Store, ledger: Ledger, fake_clock: FakeClock, closed: list[Turn]
) -> None:
    ledger.release(lease(ledger, size=1))
    store.append(more("r", closed[-1], fake_clock.now))
    assert state(store, "r") == ("open", None)


@pytest.mark.parametrize("taken", ["leased", "lease ran out", "trained", "skipped"])
def test_an_inferred_call_of_what_training_has_goes_elsewhere(
    store: Store, ledger: Ledger, fake_clock: FakeClock, closed: list[Turn], taken: str
) -> None:
    groups = lease(ledger, size=1)
    if taken == "lease ran out":
        fake_clock.advance(1000.0)  # its trainer may be slow, and commit all the same
    elif taken == "trained":
        commit(ledger, groups)
    elif taken == "skipped":
        skipped = {turn.turn_id: "greedy" for turn in closed}
        ledger.commit_skipped(skipped, ["r"], {"r": groups[0].lease_id})
    with pytest.raises(RolloutTaken, match="closed after 60 s without a call"):
        store.append(more("r", closed[-1], fake_clock.now))
    assert store.find_turn("r.more") is None, "nothing of it was stored"
    # As the proxy goes on: the same tokens, in a rollout that continues it.
    prompt = closed[-1].prompt_token_ids + closed[-1].completion_token_ids
    on = make_turn("on", "s", new=[*prompt, 9], created_at=fake_clock.now)
    store.append([RolloutInferred(rollout_id="s", continues="r"), on])
    if taken in ("leased", "lease ran out"):
        commit(ledger, groups)
    row = store.rollout("s").summary
    assert (row.continues, row.opened, row.state) == ("r", False, "open")
    store.append([Reward(rollout_id="s", value=0.5)])
    fake_clock.advance(IDLE_S + 1)
    assert ledger.close_idle(IDLE_S) == ["s"]
    [group] = lease(ledger, size=1)
    assert ids([group]) == [["s"]]
    commit(ledger, [group], step=2)
    trained, skipped_turns, waiting = turn_counts_of(store)
    assert (trained, waiting) == ((1 if taken == "skipped" else 3), {})
    assert skipped_turns == ({"greedy": 2} if taken == "skipped" else {})


@pytest.mark.parametrize("committed", [False, True])
def test_a_call_that_names_it_stays_there_and_is_counted_as_late(
    store: Store,
    ledger: Ledger,
    fake_clock: FakeClock,
    closed: list[Turn],
    committed: bool,
) -> None:
    groups = lease(ledger, size=1)
    if committed:
        commit(ledger, groups)
    store.append(more("r", closed[-1], fake_clock.now)[1:])
    if not committed:
        commit(ledger, groups)
    assert turn_counts_of(store) == (2, {"late": 1}, {})


def test_who_opens_it_ends_it(
    store: Store, ledger: Ledger, fake_clock: FakeClock, closed: list[Turn]
) -> None:
    """Its opening was late, as where a client's network was away."""
    store.append([RolloutStarted(rollout_id="r", task_id="t")])
    assert state(store, "r") == ("open", None)
    fake_clock.advance(1000.0)
    assert ledger.close_idle(IDLE_S) == []
    store.append([RolloutFinished(rollout_id="r")])
    assert state(store, "r") == ("waiting", None)


def test_a_reported_end_counts_before_an_inferred_one(
    store: Store, ledger: Ledger, closed: list[Turn]
) -> None:
    store.append([RolloutFinished(rollout_id="r", outcome=Outcome.ABORTED, error="gone")])
    row = store.rollout("r").summary
    assert (row.outcome, row.error, row.idle_s) == (Outcome.ABORTED, "gone", None)
    store.append([RolloutFinished(rollout_id="r", outcome=Outcome.COMPLETED, finished_at=1.0)])
    assert store.rollout("r").summary.outcome is Outcome.ABORTED, "of reported ones the first"


def test_a_reported_end_of_what_training_has_changes_nothing(
    store: Store, ledger: Ledger, closed: list[Turn]
) -> None:
    groups = lease(ledger, size=1)
    store.append([RolloutFinished(rollout_id="r", outcome=Outcome.ABORTED)])
    commit(ledger, groups)
    row = store.rollout("r").summary
    assert (row.outcome, row.idle_s) == (Outcome.COMPLETED, IDLE_S)
    assert len(store.outcomes("r")) == 1, "it is kept"


def test_a_preview_has_those_that_would_be_closed(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    store.append([*calls("r", 2, fake_clock.now - 100), Reward(rollout_id="r", value=1.0)])
    asked: dict[str, Any] = {"groups": 2, "group_size": 1}
    assert ledger.preview(**asked).groups == []
    [group] = ledger.preview(**asked, idle_s=IDLE_S).groups
    assert group.rollouts[0].outcome is Outcome.COMPLETED
    assert ledger.preview(**asked, idle_s=101.0).groups == []
    assert state(store, "r") == ("open", None)


def turn_counts_of(store: Store) -> tuple[int, dict[str, int], dict[str, int]]:
    with store.reading() as connection:
        found = turn_counts(connection)
    assert found.captured == found.trained + sum(found.skipped.values()) + sum(
        found.pending.values()
    )
    return found.trained, found.skipped, found.pending


# At the same time


def test_two_trainers_close_each_rollout_once(
    store: Store, url: str, fake_clock: FakeClock
) -> None:
    names = [f"r{n}" for n in range(20)]
    store.append([turn for name in names for turn in calls(name, 1, fake_clock.now - 100)])
    start = threading.Barrier(2)
    found: list[list[str]] = []

    def close() -> None:
        with Store.open(url) as mine:
            start.wait(20)
            found.append(Ledger(mine).close_idle(IDLE_S))

    both = [threading.Thread(target=close) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert sorted(found[0] + found[1]) == sorted(names)


@pytest.mark.databases("postgres")
def test_a_turn_that_is_being_written_keeps_its_rollout_open(
    store: Store, url: str, fake_clock: FakeClock
) -> None:
    turns = calls("r", 1, fake_clock.now - 100)
    store.append(turns)
    seen: list[list[str]] = []
    with Store.open(url) as other:
        store.append(
            more("r", turns[0], fake_clock.now),
            before_commit=lambda _connection, _new: seen.append(Ledger(other).close_idle(IDLE_S)),
        )
    assert seen == [[]]
    assert state(store, "r") == ("open", None)


@pytest.mark.databases("postgres")
def test_a_rollout_that_opens_again_during_a_lease_is_not_leased(
    store: Store, url: str, ledger: Ledger, fake_clock: FakeClock, closed: list[Turn]
) -> None:
    """The lease found it before the call's transaction had committed."""
    leasing = threading.Event()
    given: list[int] = []

    def take() -> None:
        with Store.open(url) as other:
            engine = other._engine

            def before(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
                # It knows which are ready, and is about to hold them.
                if "FOR NO KEY UPDATE" in statement and "finished_at IS NOT NULL" in statement:
                    leasing.set()

            event.listen(engine, "before_cursor_execute", before)
            given.append(len(lease(Ledger(other), size=1)))

    thread = threading.Thread(target=take)

    def during(_connection: Any, _new: Any) -> None:
        thread.start()
        assert leasing.wait(20)

    store.append(more("r", closed[-1], fake_clock.now), before_commit=during)
    thread.join(30)
    assert given == [0]
    assert state(store, "r") == ("open", None)


# Whatever the order


@dataclass
class Model:
    """What is expected of one conversation: its rollouts, the last of which calls go into."""

    turns: list[Turn] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=lambda: ["c0"])

    @property
    def last(self) -> str:
        return self.rollouts[-1]


STEPS = st.lists(
    st.sampled_from(["call", "wait", "close", "reward", "lease", "commit", "release"]),
    min_size=4,
    max_size=16,
)


@pytest.mark.databases("sqlite")
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_every_turn_is_trained_once_or_waits(
    steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock = FakeClock()
    url = f"sqlite:///{tmp_path_factory.mktemp('any')}/store.db"
    with pytest.MonkeyPatch.context() as patch, Store.open(url) as store:
        patch.setattr(ledger_module.statements, "server_time", lambda _connection: clock.now)
        _play(steps, store, clock)


def _play(steps: list[str], store: Store, clock: FakeClock) -> None:
    model, ledger = Model(), Ledger(store)
    groups: list[Any] = []
    step = 0
    for number, what in enumerate([*steps, "reward", "wait", "close", "commit", "lease", "commit"]):
        clock.advance(0.001)
        match what:
            case "call":
                _call(store, model, f"turn{number}", clock.now)
            case "wait":
                clock.advance(IDLE_S + 1)
            case "close":
                ledger.close_idle(IDLE_S)
            case "reward":
                for name in model.rollouts if model.turns else []:
                    store.append([Reward(rollout_id=name, value=float(number))])
            case "lease":
                groups += lease(ledger, groups=9, size=1, at_least=1, ttl_s=1e6)
            case "commit" if groups:
                step += 1
                commit(ledger, groups, step=step)
                groups = []
            case "release":
                ledger.release(groups)
                groups = []
    with store.reading() as connection:
        found = turn_counts(connection)
        shown = list(connection.execute(select(Rollouts.rollout_id, Rollouts.continues)))
    assert found.captured == found.trained == len(model.turns)
    assert sorted(shown) == [
        (name, model.rollouts[n - 1] if n else None)
        for n, name in enumerate(model.rollouts)
        if model.turns
    ]


def _call(store: Store, model: Model, turn_id: str, at: float) -> None:
    """As the proxy stores it: where the conversation is, or else in a new rollout."""
    behind = model.turns[-1] if model.turns else None
    turn = make_turn(turn_id, model.last, parent=behind, created_at=at)
    try:
        store.append([RolloutInferred(rollout_id=model.last), turn])
    except RolloutTaken:
        taken = model.last
        model.rollouts.append(f"c{len(model.rollouts)}")
        turn = make_turn(turn_id, model.last, new=turn.prompt_token_ids, created_at=at)
        store.append([RolloutInferred(rollout_id=model.last, continues=taken), turn])
    model.turns.append(turn)
