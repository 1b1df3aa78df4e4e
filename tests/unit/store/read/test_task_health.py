"""Tasks and images whose attempts all fail, or whose reward never varies, are set aside."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from sqlalchemy import func, select

from support.store.events import chain
from tracegrad.events import Event, Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import Store
from tracegrad.store.ledger import quarantine
from tracegrad.store.ledger.quarantine import apply_rule, decide
from tracegrad.store.models import TaskDecisions
from tracegrad.store.read.task_health import (
    EQUAL_REWARD,
    FAILS,
    QuarantineRule,
    Subject,
    SubjectHealth,
    TaskDecision,
    known_images,
    quarantined,
    subject_health,
)

RULE = QuarantineRule(failures=3, equal_rewards=4, versions=2, retry_after_s=60)
TASK, IMAGE = Subject("task", "t"), Subject("image", "img")
_numbers = itertools.count()


def attempt(
    store: Store,
    task: str = "t",
    *,
    outcome: Outcome | None = Outcome.COMPLETED,
    reward: float | None = None,
    version: int = 0,
    image: str | None = None,
    held_out: bool = False,
    error: str | None = None,
) -> None:
    """Opened now: what was decided before it is older."""
    name = f"r{next(_numbers):06d}"
    opened = RolloutStarted(
        rollout_id=name,
        task_id=task,
        tags={"image": image} if image else {},
        held_out=held_out,
        opened_at=time.time(),
    )
    events: list[Event] = [opened, *chain(name, 1, version=version)]
    if reward is not None:
        events.append(Reward(rollout_id=name, value=reward))
    if outcome is not None:
        events.append(RolloutFinished(rollout_id=name, outcome=outcome, error=error))
    store.append(events)


def fail(store: Store, times: int = 3, task: str = "t", **more: object) -> None:
    for _ in range(times):
        attempt(store, task, outcome=Outcome.ENV_ERROR, **more)  # type: ignore[arg-type]


def same(store: Store, times: int = 4, reward: float = 0.0, **more: object) -> None:
    for number in range(times):
        attempt(store, reward=reward, version=number % 2, **more)  # type: ignore[arg-type]


def look(store: Store, subject: Subject = TASK) -> SubjectHealth:
    with store.reading() as connection:
        [found] = subject_health(connection, [subject], RULE)
    return found


def applied(store: Store, subject: Subject = TASK) -> SubjectHealth:
    [found] = apply_rule(store, [subject], RULE)
    return found


def decisions(store: Store) -> int:
    with store.reading() as connection:
        return connection.scalar(select(func.count()).select_from(TaskDecisions)) or 0


def by_hand(store: Store, kind: str, subject: Subject = TASK, why: str = "because") -> None:
    decision = TaskDecision(
        subject=subject.kind,
        subject_id=subject.id,
        kind="release" if kind == "release" else "quarantine",
        by="me@here",
        reason=why,
        created_at=time.time(),
    )
    decide(store, decision)


def test_a_task_whose_attempts_all_fail_is_set_aside_with_its_evidence(store: Store) -> None:
    attempt(store, "t", reward=1.0)
    fail(store, 1)
    attempt(store, "t", outcome=Outcome.INFRA_ERROR, error="out of memory")
    attempt(store, "t", outcome=Outcome.ABORTED)  # a Ctrl-C says nothing
    attempt(store, "other", reward=1.0)
    assert look(store).state == "ok", "two are too few"
    fail(store, 1, error="no such image:\n  fix-7")
    found = look(store)
    assert (found.state, found.by) == ("suspect", FAILS)
    assert decisions(store) == 0, "who looks decides nothing"
    found = applied(store)
    assert (found.state, found.by) == ("quarantined", FAILS)
    assert found.why.startswith("the last 3 attempts failed (2 env_error, 1 infra_error); 1 with: ")
    assert found.decision is not None
    assert found.decision.evidence is not None
    assert found.decision.evidence["outcomes"] == {"env_error": 2, "infra_error": 1}
    assert applied(store).decision == found.decision, "asked again it is decided once"
    assert decisions(store) == 1


def test_where_nobody_succeeds_the_machine_fails_and_no_task_is_to_blame(store: Store) -> None:
    attempt(store, "other", reward=1.0)
    fail(store)
    fail(store, task="u")
    assert [one.state for one in apply_rule(store, [TASK, Subject("task", "u")], RULE)] == [
        "ok",
        "ok",
    ]
    attempt(store, "third", outcome=Outcome.BUDGET, reward=0.0)
    assert applied(store).state == "quarantined"


def test_the_writers_lock_is_held_for_those_alone_that_are_decided_about(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[Subject]] = []

    def health(connection: object, subjects: Collection[Subject], rule: object) -> object:
        asked.append([*subjects])
        return subject_health(connection, subjects, rule)  # type: ignore[arg-type]

    monkeypatch.setattr(quarantine, "subject_health", health)
    fail(store)
    attempt(store, "other", reward=1.0)
    both = [Subject("task", "other"), TASK]
    assert [one.state for one in apply_rule(store, both, RULE)] == ["ok", "quarantined"]
    assert asked == [both, [TASK], both]


def test_one_that_may_be_tried_again_is_released_by_its_own_success(store: Store) -> None:
    fail(store)
    attempt(store, "other", reward=1.0)
    found = applied(store)
    assert found.decision is not None
    at = max(found.decision.created_at, found.tried_at or 0.0)
    for retry, waited_s, may in ((True, 59, False), (True, 61, True), (False, 61, False)):
        assert found.may_run(retry=retry, rule=RULE, now=at + waited_s) is may
    fail(store, 1)
    found = applied(store)
    assert found.state == "quarantined"
    assert found.tried_at is not None
    assert found.tried_at > at
    assert not found.may_run(retry=True, rule=RULE, now=found.tried_at + 59), "tried just now"
    attempt(store, "t", outcome=Outcome.AGENT_ERROR, reward=0.0)
    found = applied(store)
    assert (found.state, found.may_run(retry=False, rule=RULE, now=at)) == ("ok", True)
    assert found.decision is not None
    assert (found.decision.kind, found.decision.by) == ("release", FAILS)
    fail(store, 2)
    assert applied(store).state == "ok", "what was before the release does not count"


def test_a_reward_that_never_varies_is_so_over_several_versions(store: Store) -> None:
    for _ in range(4):
        attempt(store, reward=0.5, version=7)
    assert look(store).state == "ok", "a policy that stays gives the same for good reasons"
    attempt(store, reward=0.5, version=8)
    found = applied(store)
    assert (found.state, found.by) == ("quarantined", EQUAL_REWARD)
    assert found.why.startswith("the last 4 rewards are all 0.5, over 2 policy versions")
    attempt(store, reward=0.5, version=9)
    assert applied(store).state == "quarantined"
    attempt(store, reward=0.25, version=9)
    assert applied(store).state == "ok"


def test_rewards_that_vary_or_that_are_held_out_are_no_reason(store: Store) -> None:
    same(store, 3)
    attempt(store, reward=1.0, version=1)
    same(store, 3)
    assert look(store).state == "ok"
    same(store, 2, held_out=True)
    same(store, 2, reward=None)  # type: ignore[arg-type]
    assert look(store).state == "ok"
    same(store, 1)
    assert look(store).state == "suspect", "four of training in a row, whatever lies between"


def test_an_image_is_set_aside_when_several_tasks_fail_in_it(store: Store) -> None:
    fail(store, image="img")
    attempt(store, "other", reward=1.0, image="good")
    assert look(store, IMAGE).state == "ok", "it may be the task"
    fail(store, 1, task="u", image="img")
    found = applied(store, IMAGE)
    assert found.state == "quarantined"
    assert "at 2 tasks" in found.why
    assert look(store, Subject("image", "good")).state == "ok"
    with store.reading() as connection:
        assert known_images(connection) == [Subject("image", "good"), IMAGE]
        assert quarantined(connection) == [IMAGE]


def test_what_people_decide_stands_until_they_decide_otherwise(store: Store) -> None:
    attempt(store, reward=1.0)
    by_hand(store, "quarantine", why="its tests are wrong")
    attempt(store, reward=0.0)
    found = applied(store)
    assert (found.state, found.by, found.why) == ("quarantined", "me@here", "its tests are wrong")
    by_hand(store, "release")
    assert look(store).state == "ok"
    fail(store, 2)
    attempt(store, "other", reward=1.0)
    assert applied(store).state == "ok"
    fail(store, 1)
    assert applied(store).state == "quarantined"


def test_a_decision_says_who_and_why_of_something_that_is_there(store: Store) -> None:
    with pytest.raises(ValueError, match="no rollout is of task typo; `tracegrad tasks ls`"):
        by_hand(store, "quarantine", Subject("task", "typo"))
    attempt(store)
    with pytest.raises(ValueError, match="task t is not quarantined"):
        by_hand(store, "release")
    with pytest.raises(ValueError, match="reason: is empty"):
        by_hand(store, "quarantine", why=" ")
    by_hand(store, "quarantine")
    with pytest.raises(ValueError, match="task t is quarantined already"):
        by_hand(store, "quarantine")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"failures": 0}, "failures: 0; give at least 1"),
        ({"equal_rewards": 1}, "equal_rewards: 1; give at least 2"),
        ({"versions": 0}, "versions: 0; give at least 1"),
        ({"retry_after_s": float("nan")}, "retry_after_s: nan; give seconds from 0 on"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(RULE, **wrong)  # type: ignore[arg-type]


def test_many_subjects_are_answered_in_their_order(store: Store) -> None:
    fail(store, task="b")
    attempt(store, "a", reward=1.0)
    names: Sequence[str] = ["c", "b", "a", "b"]
    with store.reading() as connection:
        found = subject_health(connection, [Subject("task", name) for name in names], RULE)
    assert [(one.subject.id, one.state) for one in found] == [
        ("c", "ok"),
        ("b", "suspect"),
        ("a", "ok"),
        ("b", "suspect"),
    ]
