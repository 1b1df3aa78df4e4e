"""Why nothing trains: each thing that may hold a batch back is named, with how much of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.store.events import make_turn
from support.trainer.step_samples import rollout
from tracegrad.events import (
    Event,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
)
from tracegrad.store import Ledger, Scoring, StepRecord, Store
from tracegrad_trainer.rl.wait_reason import BatchNeeds, wait_reason

AGO_S = 3 * 3600.0
URL = "http://127.0.0.1:4141"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


def needs(**changes: Any) -> BatchNeeds:
    given: dict[str, Any] = {"groups": 2, "group_size": 4, "tags": {}}
    given["incomplete_after_s"] = AGO_S + 7200
    return BatchNeeds(**{**given, "refills": False, "url": URL, **changes})


def rollouts(tasks: int, attempts: int = 1, first: int = 0) -> list[Event]:
    """Finished, with a reward, three hours ago."""
    at = time.time() - AGO_S - 6
    return [
        event
        for task in range(first, first + tasks)
        for n in range(attempts)
        for event in rollout(f"t{task}.{n}", f"t{task}", reward=float(n), seed=n, at=at)
    ]


def without(*kinds: type) -> list[Event]:
    return [event for event in rollouts(6) if not isinstance(event, kinds)]


def changed(change: Callable[[Any], Event], kind: type) -> list[Event]:
    return [change(event) if isinstance(event, kind) else event for event in rollouts(6)]


def with_outcome(event: RolloutFinished) -> Event:
    return RolloutFinished(rollout_id=event.rollout_id, outcome=Outcome.ENV_ERROR)


def renamed(event: Reward) -> Event:
    return Reward(rollout_id=event.rollout_id, value=1.0, name="score")


def untitled(event: RolloutStarted) -> Event:
    return RolloutStarted(rollout_id=event.rollout_id, opened_at=event.opened_at)


@pytest.mark.parametrize(
    ("events", "kind", "words"),
    [
        (list, "no_rollouts", f"no rollout yet: point agents at the proxy at {URL}/v1"),
        (
            lambda: rollouts(24),
            "few_attempts",
            "24 tasks have 1 of 4 attempts; 0 of 2 groups ready; newest 3 h ago",
        ),
        (
            lambda: [*rollouts(5, 2), *rollouts(1, 3, first=5), *rollouts(1, 4, first=6)],
            "few_attempts",
            "5 tasks have 2 of 4 attempts, 1 has 3 of 4 (a smaller group is taken in 2 h);"
            " 1 of 2 groups ready; newest 3 h ago",
        ),
        (lambda: rollouts(2, 4), "ready", "2 of 2 groups ready; newest 3 h ago"),
        (lambda: without(Reward), "no_reward", "6 rollouts ended without a reward; 0 of 2 groups"),
        (
            lambda: changed(renamed, Reward),
            "named_reward",
            "6 rollouts with other rewards than the main",
        ),
        (lambda: without(RolloutFinished), "open", "6 rollouts not finished; 0 of 2"),
        (lambda: without(Turn), "no_turns", "6 rollouts ended without a recorded call; 0 of 2"),
        (
            lambda: changed(untitled, RolloutStarted),
            "no_task",
            "6 rollouts without a task, which no group",
        ),
        (
            lambda: changed(with_outcome, RolloutFinished),
            "env_error",
            "6 rollouts ended with env_error, which is not scored; 0 of 2",
        ),
    ],
)
def test_what_holds_a_batch_back_is_named(
    store: Store, events: Callable[[], list[Event]], kind: str, words: str
) -> None:
    store.append(events())  # made now: a suite may take long until it comes here
    found = wait_reason(store, needs())
    assert found.kind == kind
    assert found.text.startswith(words)


def test_what_the_ranks_have_given_back_is_not_taken_for_ready(store: Store) -> None:
    store.append(rollouts(2, 4))
    assert wait_reason(store, needs()).kind == "ready"
    back = "8 rollouts are given back: nothing fits batches.agents so far"
    found = wait_reason(store, needs(), given_back=back)
    assert (found.kind, found.text) == ("given_back", back)


def idle_calls(*ages: float) -> list[Event]:
    now = time.time()
    return [make_turn(f"t{n}", f"r{n}", created_at=now - age) for n, age in enumerate(ages)]


@pytest.mark.parametrize(
    ("ages", "idle_s", "words"),
    [
        ((12,), 60.0, "1 rollout that nobody opened is open: idle for 1. s of 60 .data.idle_s.;"),
        ((3, 32), 45.5, "2 rollouts that nobody opened are open: the first idle for 3. s of 45.5 "),
        (
            (12, 7),
            None,
            "2 rollouts that nobody opened are open, and nobody ends them: --set data.idle_s=60"
            " closes those without a call for 60 s;",
        ),
        ((-7200,), 60.0, "1 rollout .* is open: their calls are dated 2 h ahead of the store's"),
    ],
)
def test_rollouts_that_nobody_ends_are_told_apart(
    store: Store, ages: tuple[float, ...], idle_s: float | None, words: str
) -> None:
    store.append(idle_calls(*ages))
    found = wait_reason(store, needs(idle_s=idle_s))
    assert found.kind == "idle_open"
    assert re.match(words, found.text), found.text
    store.append(without(RolloutFinished))
    found = wait_reason(store, needs(idle_s=idle_s))
    assert (found.kind, "6 rollouts not finished" in found.text) == ("open", True)
    assert re.search(words, found.text)


def test_of_very_many_nobody_is_counted_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tracegrad.store.ledger.idle", "tracegrad_trainer.rl.wait_reason"):
        monkeypatch.setattr(f"{module}.MOST_LOOKED_AT", 2)
    store.append([*idle_calls(1, 2, 3), *without(RolloutFinished)])
    said = wait_reason(store, needs()).text
    assert "6 rollouts not finished" in said
    assert "2 rollouts or more that nobody opened are open" in said


def test_settings_of_before_there_was_the_time_have_none() -> None:
    data = {"tags": {}, "incomplete_after_s": 1.0}
    resolved = {"batches": {"groups": 1, "group_size": 1}, "data": data, "objective": {}}
    assert BatchNeeds.of(resolved, None).idle_s is None
    assert BatchNeeds.of(resolved | {"data": data | {"idle_s": 5.0}}, None).idle_s == 5.0


def test_rollouts_with_other_tags_are_named_with_the_tags(store: Store) -> None:
    store.append(rollouts(3))
    found = wait_reason(store, needs(tags={"split": "train"}))
    assert found.kind == "not_selected"
    assert "3 rollouts without the tags that data.tags asks for (split=train)" in found.text


def test_rollouts_without_a_task_are_groups_where_groups_are_of_one(store: Store) -> None:
    store.append(changed(untitled, RolloutStarted))
    assert wait_reason(store, needs(group_size=1)).kind == "ready"


def test_what_was_looked_at_since_the_last_step_and_not_trained_is_counted(store: Store) -> None:
    store.append(rollouts(3))
    ledger = Ledger(store)
    record = StepRecord(step=1, version=1, checkpoint="c")
    of = {task: [f"t{task}.0.{n}" for n in range(3)] for task in range(3)}
    ledger.commit_skipped(dict.fromkeys(of[0], "greedy"), ["t0.0"])
    ledger.commit_step(record, trained=of[1], skipped={}, rollouts=["t1.0"])
    assert wait_reason(store, needs()).kind == "few_attempts"
    ledger.commit_skipped({of[2][0]: "stale"} | dict.fromkeys(of[2][1:], "equal_reward"), ["t2.0"])
    found = wait_reason(store, needs())
    assert found.kind == "filtered"
    assert found.text.startswith(
        "3 turns since the last step could not be trained (2 equal_reward, 1 stale); 0 of 2"
    )


def test_a_lease_is_ours_or_anothers(store: Store) -> None:
    store.append(rollouts(1, 4))
    Ledger(store).lease(groups=1, group_size=4, owner="host:/folder:abc", ttl_s=60)
    other = wait_reason(store, needs(), "xyz")
    assert other.kind == "leased"
    assert "4 rollouts leased to another trainer (host:/folder:abc)" in other.text
    ours = wait_reason(store, needs(refills=True), "abc")
    assert ours.kind == "held"
    assert "waits for groups of different rewards" in ours.text
    under_way = wait_reason(store, needs(), "abc")
    assert (under_way.kind, under_way.text) == ("ready", "a batch of 4 rollouts is under way")


def test_when_all_was_trained_nothing_new_came(store: Store) -> None:
    store.append(rollouts(1))
    turns = [f"t0.0.{n}" for n in range(3)]
    record = StepRecord(step=1, version=1, checkpoint="c")
    Ledger(store).commit_step(record, trained=turns, skipped={}, rollouts=["t0.0"])
    found = wait_reason(store, needs())
    assert (found.kind, found.text) == (
        "idle",
        "no new rollouts; 0 of 2 groups ready; newest 3 h ago",
    )


def test_rollouts_that_wait_for_scorers_and_those_that_failed_are_told_apart(store: Store) -> None:
    store.append(rollouts(6))
    found = wait_reason(store, needs(composed=True))
    assert found.kind == "unscored"
    assert found.text.startswith("6 rollouts ended, and lack a part of the reward")
    failed = [
        Scoring(
            rollout_id=f"t{n}.0",
            scorer="resolved",
            digest="d",
            turns=1,
            round=0,
            state="failed",
            error="resolved timed out after 30 s" if n else "resolved raised KeyError: 'x'",
        )
        for n in range(4)
    ]
    assert store.record_scorings(failed, [])
    found = wait_reason(store, needs(composed=True))
    assert found.kind == "scoring_failed"
    assert found.text.startswith(
        "4 rollouts could not be scored: resolved timed out after 30 s (and 1 other error); "
    )
    assert "2 rollouts ended, and lack a part" in found.text


def test_live_rollouts_wait_for_similar_ones_and_for_how_long_at_most(store: Store) -> None:
    store.append([each for each in rollouts(2) if not isinstance(each, Reward)])
    found = wait_reason(store, needs(composed=True, judges_similar=True, incomplete_after_s=120))
    assert found.kind == "unscored"
    assert "judged with similar ones when their group is whole, or after 120 s" in found.text
    resolved = {
        "batches": {"groups": 2, "group_size": 4},
        "data": {"tags": {}, "incomplete_after_s": 120.0, "refill": None},
        "objective": {"preset": "grpo"},
        "rewards": {"judge": {"groups": "similar"}},
    }
    assert BatchNeeds.of(resolved, URL).judges_similar
    assert not BatchNeeds.of({**resolved, "rewards": {"judge": None}}, URL).judges_similar
