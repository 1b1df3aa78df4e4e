"""Events go in once, in any order, and come out as they were."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from support.store.events import make_span, make_turn, rollout_events
from support.store.query_plans import uses_index
from tracegrad.events import (
    OVER_LENGTH,
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    Turn,
    token_id_array,
)
from tracegrad.store import (
    AmbiguousRollout,
    EventRejected,
    Ledger,
    RolloutFilter,
    Store,
    UnknownRollout,
)
from tracegrad.store.expressions import begins_with
from tracegrad.store.models import Rollouts


def test_attempts_that_begin_with_one_long_prompt_are_each_what_they_were(store: Store) -> None:
    """It is packed once; a child still proves that it begins with it."""
    prompt = token_id_array(range(2000))
    roots = [
        replace(make_turn(f"t{at}", rollout_id=f"r{at}"), prompt_token_ids=prompt[:])
        for at in range(3)
    ]
    for root in roots:
        store.append([root])
    child = make_turn("c", parent=roots[2], rollout_id="r2")
    store.append([child])
    assert [store.rollout_turns(f"r{at}") for at in range(3)] == [
        [roots[0]],
        [roots[1]],
        [roots[2], child],
    ]
    other = replace(
        child, turn_id="d", prompt_token_ids=token_id_array([7, *child.prompt_token_ids[1:]])
    )
    with pytest.raises(EventRejected, match="does not begin with"):
        store.append([other])


def test_every_field_of_every_event_comes_back(store: Store) -> None:
    opened = RolloutStarted(
        rollout_id="r", task_id="t", agent="a", tags={"z": "1", "a": "2"}, task={"q": [1, None]}
    )
    root = make_turn("t0", request={"messages": [{"role": "user", "content": "hi é \0"}]})
    turn = make_turn(
        "t1",
        parent=root,
        fork_reason="template",
        sampling={"temperature": 0.7},
        finish_reason="stop",
        untrainable="greedy",
        parent_span_id="ab" * 8,
        response={"choices": []},
    )
    turn = replace(turn, policy_versions=((3, 1), (4, 1)))
    reward = Reward(rollout_id="r", value=0.1, name="format", turn=-1, source="person")
    span = Span(
        trace_id="0" * 32,
        span_id="1" * 16,
        parent_span_id="2" * 16,
        rollout_id="r",
        name="tool",
        kind="client",
        start_ns=1_700_000_000_000_000_001,
        end_ns=1_700_000_000_000_000_002,
        status="error",
        attributes={"k": [1, "two"]},
    )
    finished = RolloutFinished(rollout_id="r", outcome=Outcome.AGENT_ERROR, error="boom")
    store.append([opened, root, turn, reward, span, finished])

    detail = store.rollout("r")
    assert detail.turns == [root, turn] == store.rollout_turns("r")
    assert detail.rewards == [reward] == store.rewards("r")
    assert detail.spans == [span] == store.spans("r")
    assert detail.task == opened.task
    row = detail.summary
    assert (row.task_id, row.agent, row.opened_at) == ("t", "a", opened.opened_at)
    assert list(row.tags.items()) == [("z", "1"), ("a", "2")]
    ended = (row.outcome, row.error, row.finished_at)
    assert ended == (Outcome.AGENT_ERROR, "boom", finished.finished_at)
    assert store.find_turn("t1") == turn
    assert store.find_turn("nobody") is None


def test_writing_again_changes_nothing(store: Store) -> None:
    events = rollout_events("r")
    store.append(events)
    before = store.rollout("r")
    store.append(events)
    store.append([*events, *events])
    assert store.outcomes("r") == [RolloutFinished(rollout_id="r", finished_at=1001.0)]
    late = RolloutStarted(rollout_id="r", task_id="other", tags={"late": "yes"})
    store.append([late, RolloutFinished(rollout_id="r", outcome=Outcome.ABORTED)])
    assert store.rollout("r") == before


def test_every_end_is_kept_and_the_first_counts(store: Store) -> None:
    ends = [
        RolloutFinished(rollout_id="r", outcome=Outcome.BUDGET, finished_at=20.0),
        RolloutFinished(rollout_id="r", outcome=Outcome.ABORTED, error="late", finished_at=30.0),
        RolloutFinished(rollout_id="r", outcome=Outcome.COMPLETED, finished_at=10.0),
        RolloutFinished(rollout_id="r", outcome=Outcome.INFRA_ERROR, finished_at=30.0),
    ]
    store.append([make_turn("t"), *ends[:2]])
    store.append([ends[2], ends[0]])  # sent later, of an earlier time; and one sent twice
    store.append([ends[3]])
    assert store.outcomes("r") == ends
    row = store.rollout("r").summary
    assert (row.outcome, row.error, row.finished_at) == (Outcome.BUDGET, None, 20.0)
    assert store.outcomes("nobody") == []


def test_a_rollout_ends_when_its_end_was_heard_of(store: Store) -> None:
    """Its agent's clock may be wrong."""
    store.append([RolloutFinished(rollout_id="r", finished_at=2e9, recorded_at=10.0)])
    row = store.rollout("r").summary
    assert (row.opened_at, row.finished_at) == (10.0, 10.0)
    assert [end.finished_at for end in store.outcomes("r")] == [2e9]


def test_ends_that_come_after_training_are_kept(store: Store) -> None:
    store.append(rollout_events("r"))
    Ledger(store).commit_skipped({"r.0": "stale", "r.1": "stale"}, ["r"])
    store.append([RolloutFinished(rollout_id="r", outcome=Outcome.INFRA_ERROR, finished_at=2e9)])
    assert [end.outcome for end in store.outcomes("r")] == ["completed", "infra_error"]
    row = store.rollout("r").summary
    assert (row.outcome, row.state) == (Outcome.COMPLETED, "consumed")


def test_a_crash_over_a_full_context_is_kept_as_it_was(store: Store) -> None:
    store.append([refused("a"), crash()])
    assert store.rollout("r").summary.outcome == Outcome.BUDGET
    assert [end.outcome for end in store.outcomes("r")] == [Outcome.AGENT_ERROR]


def test_events_may_come_in_any_order(store: Store) -> None:
    """Whatever comes first makes a bare rollout; the opening fills it in."""
    events: list[Event] = [
        RolloutStarted(rollout_id="?", task_id="t", agent="a", tags={"k": "v"}, opened_at=5.0),
        make_turn("?.t", "?", created_at=7.0),
        Reward(rollout_id="?", value=1.0),
        make_span(1, "?"),
        RolloutFinished(rollout_id="?", finished_at=9.0),
    ]
    orders = {f"r{n:03d}": order for n, order in enumerate(itertools.permutations(events))}
    for each in range(len(events)):
        store.append([_renamed(order[each], name) for name, order in orders.items()])
    for name in orders:
        row = store.rollout(name).summary
        assert (row.task_id, row.agent, row.tags, row.opened_at) == ("t", "a", {"k": "v"}, 5.0)
        assert (row.reward, row.turns, row.outcome) == (1.0, 1, Outcome.COMPLETED)


def _renamed(event: Event, name: str) -> Event:
    match event:
        case Turn():
            return replace(event, rollout_id=name, turn_id=f"{name}.t")
        case Span():
            return replace(event, rollout_id=name, trace_id=name)
        case Reward():
            return replace(event, rollout_id=name, reward_id=f"{name}.w")
        case _:
            return replace(event, rollout_id=name)


def test_a_bare_rollout_is_listed_untitled(store: Store) -> None:
    late = Reward(rollout_id="wanderer", value=1.0, created_at=43.0)
    store.append([make_turn("t", "wanderer", created_at=42.0), late])
    [row] = store.rollouts()
    bare = (row.rollout_id, row.task_id, row.opened_at, row.state)
    assert bare == ("wanderer", None, 42.0, "open")


def test_a_span_without_a_rollout_is_kept(store: Store) -> None:
    store.append([make_span(1)])
    assert store.rollouts() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_must_be_finite(store: Store, value: float) -> None:
    with pytest.raises(EventRejected, match="value: reward 'reward' of rollout r"):
        store.append([make_turn("t"), Reward(rollout_id="r", value=value)])
    assert store.rollouts() == [], "nothing of the batch was stored"


def test_a_child_must_continue_its_parent(store: Store) -> None:
    root = make_turn("t0", new=[1, 2], sampled=[3])
    store.append([root])
    for prompt in ([1, 2], [1, 2, 9], [9, 2, 3, 4], []):
        child = replace(make_turn("t1", new=prompt), parent_id="t0")
        with pytest.raises(EventRejected, match="the prompt of turn t1 does not begin with"):
            store.append([child])
    with pytest.raises(EventRejected, match="parent_id: turn nobody"):
        store.append([replace(make_turn("t1"), parent_id="nobody")])
    with pytest.raises(EventRejected, match="belongs to rollout r"):
        store.append([make_turn("t1", "other", parent=root)])
    assert store.rollout_turns("r") == [root]


def test_what_the_database_could_not_hold_is_made_fit(store: Store) -> None:
    """An error text from a broken program must not cost the rollout its end."""
    odd = {"big": 2**70, "odd": object, "half": "\ud800\0", 3: math.nan}
    store.append(
        [
            RolloutFinished(rollout_id="r", error="bad \ud800 \0 text"),
            make_span(1, "r", attributes=odd),
            RolloutStarted(rollout_id="r", task=[math.inf, "NaN", "\0", -math.inf]),
        ]
    )
    detail = store.rollout("r")
    assert detail.summary.error == "bad ? \ufffd text"
    assert detail.spans[0].attributes == {
        "big": 2**70, "odd": str(object), "half": "\ud800\0", "3": None
    }  # fmt: skip
    assert detail.task == [None, "NaN", "\0", None]


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (RolloutStarted(rollout_id="é" * 257), "rollout_id: 514 bytes; give at most 512"),
        (RolloutStarted(rollout_id="r", task_id="t" * 2049), "task_id: 2049 bytes"),
        (RolloutStarted(rollout_id="r", tags={"k": "v" * 2048}), "tags: 'k': 2049 bytes"),
        (Reward(rollout_id="r", value=1.0, turn=2**63), "turn: 9223372036854775808 is more"),
        (make_span(1, end_ns=2**63), "end_ns: 9223372036854775808 is more than 64 bits"),
        (make_turn("t" * 513), "turn_id: 513 bytes"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_what_no_database_can_find_again_is_refused(store: Store, event: Event, field: str) -> None:
    with pytest.raises(EventRejected, match=field):
        store.append([make_turn("good"), event])
    assert store.rollouts() == [], "nothing of the batch was stored"


def test_the_longest_names_are_stored_and_found(store: Store) -> None:
    draw = random.Random(1)

    def name(length: int) -> str:  # that no index makes smaller
        return "".join(chr(draw.randrange(33, 127)) for _ in range(length))

    rollout, task, tag = name(512), name(2048), (name(1000), name(1048))
    store.append(
        [
            RolloutStarted(rollout_id=rollout, task_id=task, tags=dict([tag])),
            make_turn(name(512), rollout),
            Reward(rollout_id=rollout, value=1.0, reward_id=name(512)),
            replace(make_span(1, rollout, trace_id=name(512)), span_id=name(512)),
        ]
    )
    [row] = store.rollouts(RolloutFilter(task=task, tags=dict([tag])))
    assert (row.rollout_id, row.turns, row.reward) == (rollout, 1, 1.0)


def test_a_value_that_is_no_json_is_refused(store: Store) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(EventRejected, match="it is no JSON"):
        store.append([RolloutStarted(rollout_id="r", task=endless)])
    assert store.rollouts() == []


def test_rollouts_filter_and_order(store: Store) -> None:
    store.append(rollout_events("a", at=10, task="x", tags={"split": "train", "k": "1"}))
    store.append(rollout_events("b", at=20, task="y", tags={"split": "train"}, reward=None))
    store.append(rollout_events("c", at=30, task="y", tags={"split": "held_out"}, outcome=None))

    def ids(limit: int | None = 50, **wanted: Any) -> str:
        rows = store.rollouts(RolloutFilter(**wanted), limit=limit)
        return "".join(row.rollout_id for row in rows)

    assert ids() == "cba"
    assert ids(limit=2) == "cb"
    assert ids(task="y") == "cb"
    assert ids(tags={"split": "train"}) == "ba"
    assert ids(tags={"split": "train", "k": "1"}) == "a"
    assert ids(outcome="open") == "c"
    assert ids(outcome="completed", since=15) == "b"
    with pytest.raises(ValueError, match="nonsense"):
        ids(outcome="nonsense")
    assert [row.state for row in store.rollouts()] == ["open", "no_reward", "waiting"]


def test_a_rollout_is_found_by_the_beginning_of_its_id(store: Store) -> None:
    for name in ("abc1", "abc2", "abc", "x_y", "xzy"):
        store.append([RolloutStarted(rollout_id=name)])
    assert store.rollout("abc1").summary.rollout_id == "abc1"
    assert store.rollout("abc").summary.rollout_id == "abc", "an exact id beats longer ones"
    assert store.rollout("x_").summary.rollout_id == "x_y", "no wildcard"
    with pytest.raises(AmbiguousRollout, match="abc, abc1, abc2"):
        store.rollout("ab")
    for nobody in ("q", ""):
        with pytest.raises(UnknownRollout):
            store.rollout(nobody)


def test_the_beginning_of_an_id_is_found_through_an_index(store: Store) -> None:
    query = select(Rollouts.rollout_id).where(begins_with(Rollouts.rollout_id, "ab"))
    assert uses_index(store, query.order_by(Rollouts.rollout_id).limit(4))


def test_beginnings_differ_by_case_and_by_accent(store: Store) -> None:
    names = {"A": "Abc", "abd": "abd", "á": "ábe", "ab\U0001f600": "ab\U0001f600z", "%": "%%"}
    store.append([RolloutStarted(rollout_id=name) for name in names.values()])
    for prefix, name in names.items():
        assert store.rollout(prefix).summary.rollout_id == name
    with pytest.raises(UnknownRollout):
        store.rollout("AB")


def test_a_rollouts_reward_is_the_last_to_arrive(store: Store) -> None:
    store.append([*rollout_events("r", reward=None)])
    for value, at, name, turn in [
        (0.1, 10.0, "reward", None),
        (0.9, 30.0, "reward", None),
        (0.2, 20.0, "reward", None),  # arrives later, and says it was given earlier
        (0.5, 40.0, "format", None),
        (0.6, 40.0, "reward", 0),
    ]:
        store.append([Reward(rollout_id="r", value=value, created_at=at, name=name, turn=turn)])
    assert store.rollout("r").summary.reward == 0.2
    store.append([Reward(rollout_id="r", value=0.3, created_at=1e11)])
    store.append([Reward(rollout_id="r", value=0.4, created_at=0.0)])
    store.append([Reward(rollout_id="r", value=v, created_at=5.0) for v in (0.7, 0.3)])
    assert store.rollout("r").summary.reward == 0.3
    assert [point.reward for point in store.reward_curve()] == [0.3]


# An agent that used up its context


def refused(turn_id: str, rollout_id: str = "r") -> Turn:
    """A call that the engine refused, as the proxy records it."""
    return make_turn(turn_id, rollout_id, new=[], sampled=[], untrainable=OVER_LENGTH)


def crash(rollout_id: str = "r") -> RolloutFinished:
    return RolloutFinished(rollout_id=rollout_id, outcome=Outcome.AGENT_ERROR, error="400: long")


@pytest.mark.parametrize(
    "batches",
    [
        [[make_turn("a")], [refused("b")], [crash()]],
        [[make_turn("a"), refused("b"), crash()]],
        [[crash(), make_turn("a"), refused("b")]],
        [[refused("b")], [crash(), crash()]],
    ],
    ids=["one by one", "one batch", "end first in the batch", "sent twice"],
)
def test_a_crash_over_a_full_context_is_the_budgets_end(
    store: Store, batches: list[list[Event]]
) -> None:
    for batch in batches:
        store.append(batch)
    row = store.rollout("r").summary
    assert (row.outcome, row.error) == (Outcome.BUDGET, "400: long")


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([crash()], Outcome.AGENT_ERROR),
        ([make_turn("a"), crash()], Outcome.AGENT_ERROR),
        ([refused("a"), make_turn("b"), crash()], Outcome.AGENT_ERROR),
        ([make_turn("a", untrainable="aborted"), crash()], Outcome.AGENT_ERROR),
        ([refused("a", "other"), crash()], Outcome.AGENT_ERROR),
        ([refused("a"), RolloutFinished(rollout_id="r")], Outcome.COMPLETED),
        (
            [refused("a"), RolloutFinished(rollout_id="r", outcome=Outcome.ENV_ERROR)],
            Outcome.ENV_ERROR,
        ),
    ],
    ids=str.split("bare trained went-on aborted other-rollout completed env-error"),
)
def test_other_ends_stay_what_they_were_called(
    store: Store, events: list[Event], outcome: Outcome
) -> None:
    store.append(events)
    assert store.rollout("r").summary.outcome == outcome


def test_an_end_that_is_stored_is_not_changed_by_a_later_turn(store: Store) -> None:
    store.append([make_turn("a"), crash()])
    store.append([refused("b")])
    assert store.rollout("r").summary.outcome == Outcome.AGENT_ERROR
