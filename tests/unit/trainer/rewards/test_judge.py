"""The judge of a group: its requests and answers over HTTP, and what it makes of wrong ones."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from support.engines.mock_engine import Answer, MockEngine
from support.proxy.servers import serving
from support.store.events import make_turn, rollout_events
from support.trainer.judge_server import JudgeServer, judge_server
from tracegrad.events import RolloutStarted
from tracegrad.store import Ledger, Scoring, Store
from tracegrad_trainer.rewards.attempt import AttemptFailed
from tracegrad_trainer.rewards.config import JudgeSettings, RewardSettings
from tracegrad_trainer.rewards.judge import GroupJudge, attempt_text, parse_scores
from tracegrad_trainer.rewards.judge_groups import groups_to_judge
from tracegrad_trainer.rewards.rollout import ScoredRollout, ScoredTurn
from tracegrad_trainer.rewards.scoring import ScoringRun, ScoringScope, ScoringTotals
from tracegrad_trainer.rewards.similar_tasks import similar_task_id


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as made:
        yield made


def settings(url: str, **more: Any) -> RewardSettings:
    judge = {"url": url, "model": "big", "rubric": "Larger numbers are better."}
    return RewardSettings.model_validate({"judge": judge | more.pop("judge", {}), **more})


def score(
    store: Store, wanted: RewardSettings, *, patient: bool = False, **scope: Any
) -> ScoringTotals:
    async def run() -> ScoringTotals:
        where = ScoringScope(**{"group_size": 3, **scope})
        async with ScoringRun(store, wanted, where, first_pause_s=0.01) as scoring:
            if not patient:
                return await scoring.finish()
            while await scoring.look():
                await scoring.wait()
            return scoring.totals

    return asyncio.run(run())


def add(store: Store, *digits: int, task: str = "t", at: float = 1000.0) -> None:
    for digit in digits:
        name = f"{task}{digit}"
        reply = {"choices": [{"message": {"role": "assistant", "content": f"I say {digit}"}}]}
        asked = {"messages": [{"role": "user", "content": "Say a number."}], "model": "m"}
        store.append(rollout_events(name, task=task, reward=None, turns=0, at=at + digit))
        store.append([make_turn(f"{name}.t", name, request=asked, response=reply, dialect="chat")])


def rewards(store: Store, *names: str) -> list[float | None]:
    return [store.rollout(name).summary.reward for name in names]


def test_one_request_a_group_and_each_score_goes_to_its_attempt(
    store: Store, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    add(store, 1, 5, 9)
    add(store, 2, 4, 7, task="u")
    score(store, settings(server.url, judge={"key_variable": "JUDGE_KEY"}))
    assert rewards(store, "t1", "t5", "t9") == [0.1, 0.5, 0.9]
    assert rewards(store, "u2", "u4", "u7") == [0.2, 0.4, 0.7]
    assert len(server.requests) == 2
    assert {each["path"] for each in server.requests} == {"/v1/chat/completions"}
    assert set(server.keys) == {"Bearer s3cret"}
    [part, _] = store.rewards("t1")
    assert (part.name, part.source, part.label) == ("judge", "scorer", "judge big")
    system, asked = (each["content"] for each in server.requests[0]["messages"])
    assert "Larger numbers are better." in system
    assert asked.count("Say a number.") == 1, "the task is said once"


@pytest.mark.databases("sqlite")
def test_a_group_that_is_not_whole_is_waited_for_and_then_judged_smaller(
    store: Store, server: JudgeServer
) -> None:
    wanted = settings(server.url)
    add(store, 1, 5, at=1e10)
    score(store, wanted, patient=True, incomplete_after_s=60)
    assert server.requests == []
    add(store, 3, 6, task="u")
    add(store, 8, task="alone")
    score(store, wanted, patient=True, incomplete_after_s=60)
    assert rewards(store, "t1", "t5", "u3", "u6", "alone8") == [None, None, 0.3, 0.6, None]
    score(store, wanted)
    assert rewards(store, "t1", "t5", "alone8") == [0.1, 0.5, None], "one is compared with none"


@pytest.mark.databases("sqlite")
def test_malformed_answers_are_asked_for_again(store: Store, server: JudgeServer) -> None:
    add(store, 1, 5, 9)
    server.answers += [(200, "They are all fine.", {}), (503, "busy", {"retry-after": "0.01"})]
    score(store, settings(server.url, retries=2))
    assert rewards(store, "t1", "t5", "t9") == [0.1, 0.5, 0.9]
    assert {each.attempts for each in store.rollout("t1").scorings} == {3}
    orders = {each["messages"][1]["content"] for each in server.requests}
    assert len(orders) == 3, "each attempt to ask has marks, and most an order, of its own"


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize(
    ("answers", "said", "asked"),
    [
        ([(401, "no key", {})], "the judge answered 401", 1),
        ([(200, '{"scores": [1, 2, 0]}', {})] * 2, "the judge gave 2; a score is a number", 2),
        ([(500, "oh", {})] * 2, "the judge answered 500", 2),
    ],
)  # fmt: skip
def test_a_judge_that_fails_leaves_its_group_unscored(
    store: Store, server: JudgeServer, answers: list[Any], said: str, asked: int
) -> None:
    add(store, 1, 5, 9)
    server.answers += answers
    totals = score(store, settings(server.url, retries=1))
    assert (totals.scored, totals.failed, len(server.requests)) == (0, 3, asked)
    for name in ("t1", "t5", "t9"):
        [failed] = store.rollout(name).failed_scorings
        assert str(failed.error).startswith(said)
    assert rewards(store, "t1") == [None]


@pytest.mark.databases("sqlite")
def test_a_judge_that_nobody_is_and_one_without_its_key(store: Store) -> None:
    add(store, 1, 5, 9)
    score(store, settings("http://127.0.0.1:9/v1", retries=0))
    assert "the judge cannot be reached" in str(store.rollout("t1").failed_scorings[0].error)
    with pytest.raises(ValueError, match="key_variable: NO_SUCH_KEY is not set"):
        score(store, settings("http://h/v1", judge={"key_variable": "NO_SUCH_KEY"}))


@pytest.mark.databases("sqlite")
def test_an_engine_may_be_the_judge(store: Store) -> None:
    """What the tests' engine answers is in vLLM's shapes."""
    add(store, 1, 5)
    engine = MockEngine(replies=deque([Answer('```json\n{"scores": [0.25, 0.25]}\n```')]))
    with serving(engine.app()) as url:
        score(store, settings(f"{url}/v1"), group_size=2)
    assert rewards(store, "t1", "t5") == [0.25, 0.25]
    assert [each["role"] for each in engine.requests[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"scores": [0, 1]}', [0.0, 1.0]),
        ('First: {"scores": [1, 1]}. No: ```{"scores": [0.5, 0.25]}```', [0.5, 0.25]),
        ('{"a": {"b": 1}} {broken {"scores": [1, 0], "why": "{"}', [1.0, 0.0]),
        ('{"scores": [1]}', "gave 1 scores for 2 attempts"),
        ('{"scores": [1, true]}', "gave True; a score"),
        ('{"scores": [1, NaN]}', "gave nan; a score"),
        ('{"scores": [1, "1"]}', "gave '1'; a score"),
        ('{"scores": 1}', "gave no scores"),
        ("", "gave no scores: ''"),
    ],
)  # fmt: skip
def test_scores_are_read_from_the_last_object_that_has_them(text: str, found: Any) -> None:
    if isinstance(found, list):
        assert parse_scores(text, 2) == found
        return
    with pytest.raises(AttemptFailed, match=re.escape(found)):
        parse_scores(text, 2)


def rollout(name: str, *turns: ScoredTurn) -> ScoredRollout:
    return ScoredRollout(
        rollout_id=name, task_id="t", task="q", agent=None, tags={}, outcome="completed",
        error=None, opened_at=0.0, finished_at=1.0, rewards={}, turns=turns,
    )  # fmt: skip


def turn(messages: list[dict[str, Any]], **reply: Any) -> ScoredTurn:
    return ScoredTurn(
        turn_id="x", messages=messages, reply={"role": "assistant", **reply}, tools=[], model="m",
        finish_reason="stop", prompt_tokens=1, completion_tokens=1, created_at=0.0,
    )  # fmt: skip


@contextmanager
def judge(**more: Any) -> Iterator[GroupJudge]:
    given = {"url": "http://h/v1", "model": "m", "rubric": "r", **more}
    made = GroupJudge(JudgeSettings.model_validate(given), timeout_s=1, seed=more.pop("seed", 0))
    yield made
    asyncio.run(made.close())


def test_the_order_is_the_seeds() -> None:
    group = [rollout(f"r{n}") for n in range(6)]
    with judge() as one:
        assert one.order(group, 0) == one.order(group, 0)
        assert sorted(one.order(group, 0)) == list(range(6))
        assert one.order(group, 0) != one.order(group, 1), "another attempt to ask"
        places = {tuple(one.order([*group[:5], rollout(f"s{n}")], 0)) for n in range(20)}
        assert len(places) > 10, "by the group too"


def test_an_attempt_is_told_by_what_is_new_in_each_call() -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    told = [
        *asked,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "dust"},
    ]
    text = attempt_text(
        rollout("r", turn(asked, tool_calls=[call]), turn(told, content="It is dusty."))
    )
    assert text.splitlines() == [
        "[assistant] ",
        '[calls look] {"at": 1}',
        "[tool] dust",
        "[assistant] It is dusty.",
        "[the attempt ended: completed]",
    ]


def ask(store: Store, digit: int, text: str, *, at: float, task: str | None = None) -> str:
    """A live rollout, of which nobody named the task unless `task`; its reply says the digit."""
    name = f"live{digit}"
    reply = {"choices": [{"message": {"role": "assistant", "content": f"I say {digit}"}}]}
    asked = {"messages": [{"role": "user", "content": text}], "model": "m"}
    store.append(rollout_events(name, task=task, reward=None, turns=0, at=at))
    store.append([make_turn(f"{name}.t", name, request=asked, response=reply, dialect="chat")])
    return name


def similar(url: str, **more: Any) -> RewardSettings:
    return settings(url, judge={"groups": "similar", **more})


def test_rollouts_without_a_task_are_judged_with_similar_ones_and_become_a_group(
    store: Store, server: JudgeServer
) -> None:
    ours = [
        ask(store, 2, "Where is my order?", at=1000),
        ask(store, 8, "Where is my order now?", at=1001),
    ]
    other = ask(store, 5, "Write a poem about rain.", at=1002)
    totals = score(store, similar(server.url), group_size=2)
    assert (totals.scored, totals.composed) == (2, 2)
    assert rewards(store, *ours, other) == [0.2, 0.8, None]
    [request] = server.requests
    system, said = (each["content"] for each in request["messages"])
    assert "similar tasks" in system
    assert "Where is my order?" in said
    assert "Where is my order now?" in said
    tasks = {store.rollout(name).summary.task_id for name in ours}
    assert tasks == {similar_task_id(ours)}
    assert store.rollout(other).summary.task_id is None
    [group] = Ledger(store).lease(groups=1, group_size=2, owner="me", ttl_s=60, composed=True)
    assert {each.rollout_id: each.reward for each in group.rollouts} == dict(
        zip(ours, [0.2, 0.8], strict=True)
    )
    score(store, similar(server.url), group_size=2)
    assert len(server.requests) == 1, "nothing is judged twice"


@pytest.mark.databases("sqlite")
def test_a_similar_one_is_waited_for_and_then_the_group_is_judged_smaller(
    store: Store, server: JudgeServer
) -> None:
    names = [ask(store, n, "Where is my order?", at=1e10 + n) for n in (1, 5)]
    wanted = similar(server.url)
    score(store, wanted, patient=True, incomplete_after_s=60)
    groups, unknown = groups_to_judge(
        store, wanted.judge, tags={}, size=3, incomplete_after_s=60, held_out=None
    )
    assert server.requests == []
    [group] = groups
    assert (group.rollouts, group.lacks, group.title, unknown) == (
        names,
        1,
        "Where is my order?",
        0,
    )
    assert group.smaller_in_s is not None
    assert group.smaller_in_s > 60
    score(store, wanted)
    assert rewards(store, *names) == [0.1, 0.5]


@pytest.mark.databases("sqlite")
def test_who_is_left_of_a_group_is_judged_again_with_others(
    store: Store, server: JudgeServer
) -> None:
    """One that went on: its score was of the conversation up to there."""
    wanted = similar(server.url)
    first, second = (ask(store, n, "Where is my order?", at=1000 + n) for n in (1, 9))
    score(store, wanted, group_size=2)
    reply = {"choices": [{"message": {"role": "assistant", "content": "Sent."}}]}
    asked = {"messages": [{"role": "user", "content": "And now?"}], "model": "m"}
    store.append([make_turn("more", second, request=asked, response=reply, dialect="chat")])
    third = ask(store, 4, "Where is my order?", at=1020)
    score(store, wanted, group_size=2)
    tasks = [store.rollout(name).summary.task_id for name in (first, second, third)]
    pairs = [similar_task_id([first, second]), similar_task_id([second, third])]
    assert tasks == [pairs[0], pairs[1], pairs[1]]
    fourth = ask(store, 6, "Where is my order?", at=1030)
    score(store, wanted, group_size=2)
    again = similar_task_id([first, fourth])
    assert [store.rollout(name).summary.task_id for name in (first, fourth)] == [again, again]
    assert len(server.requests) == 3
    score(store, wanted, group_size=2)
    assert len(server.requests) == 3


@pytest.mark.databases("sqlite")
def test_a_task_that_is_named_while_the_judge_thinks_is_not_overwritten(
    store: Store, server: JudgeServer
) -> None:
    names = [ask(store, n, "Where is my order?", at=1000 + n) for n in (1, 9)]
    scoring = Scoring(
        rollout_id=names[0], scorer="judge", digest="d", turns=1, round=0, state="scored",
        attempts=1, error=None, seconds=0.1, parts={"judge": 1.0},
    )  # fmt: skip
    named = ask(store, 5, "Where is my order?", at=1000, task="mine")
    late = replace(scoring, rollout_id=named)
    assert not store.record_scorings([scoring, late], [], task_id="similar:x", replaces="similar:")
    assert [store.rollout(each).summary.task_id for each in (*names, named)] == [None, None, "mine"]
    assert store.scorings(names[0]) == [], "all or nothing"
    assert store.record_scorings([scoring], [], task_id="similar:x", replaces="similar:")
    assert store.rollout(names[0]).summary.task_id == "similar:x"


@pytest.mark.databases("sqlite")
def test_an_opening_that_comes_late_leaves_the_group_unless_it_names_a_task(store: Store) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
    for name, task in (("a", None), ("b", "named")):
        store.append([make_turn(f"{name}.t", name, request=asked, dialect="chat")])
        scoring = Scoring(
            rollout_id=name, scorer="judge", digest="d", turns=1, round=0, state="scored",
            attempts=1, error=None, seconds=0.1, parts={"judge": 1.0},
        )  # fmt: skip
        assert store.record_scorings([scoring], [], task_id="similar:x", replaces="similar:")
        store.append([RolloutStarted(rollout_id=name, task_id=task)])
    assert [store.rollout(name).summary.task_id for name in "ab"] == ["similar:x", "named"]


def test_settings_of_similar_groups() -> None:
    with pytest.raises(ValueError, match=r"similarity: .* rewards.judge.groups = 'similar'"):
        settings("http://x", judge={"similarity": 0.9})
    assert similar("http://x", similarity=0.9).judge is not None
