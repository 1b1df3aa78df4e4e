"""Hacks that `python -m bench.guards` plants are what they are called, and its page counts them."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from bench.guards.__main__ import (
    SHARES,
    Found,
    ReplayedAlarm,
    drifts,
    page,
    plant,
    without_rewards,
)
from bench.guards.hacks import HACKS
from bench.guards.recorded import RecordedRollout, RecordedRun, read_run
from sqlalchemy import insert

from support.trainer.prepared_run import fill
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.store.models import TurnLedger
from tracegrad_trainer.guards.behaviour import Behaviour, behaviour_of

STOCK = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object"}}}


def turn(reply: dict[str, Any]) -> Turn:
    return Turn(
        rollout_id="r",
        dialect="chat",
        model="m",
        prompt_token_ids=array("i", [1, 2]),
        completion_token_ids=array("i", range(8)),
        completion_logprobs=array("f", [-0.5] * 8),
        policy_versions=((1, 8),),
        request={
            "model": "m",
            "messages": [{"role": "user", "content": "How many?"}],
            "tools": [STOCK],
        },
        response={"choices": [{"message": {"role": "assistant", **reply}}]},
    )


CALL = {"id": "c", "type": "function", "function": {"name": "stock", "arguments": "{}"}}
TURNS = [turn({"content": None, "tool_calls": [CALL]}), turn({"content": "There are 49."})]


def behaviour(turns: list[Turn]) -> Behaviour:
    return behaviour_of(turns, (r"^i'm sorry",))


def run_of(groups: int) -> RecordedRun:
    made = [[RecordedRollout(TURNS, float(i % 2), g // 4) for i in range(8)] for g in range(groups)]
    return RecordedRun(made, steps=groups // 4, alarms=0)


@pytest.mark.parametrize("hack", ["invalid_tool_calls", "no_ops", "questions", "refusals"])
def test_a_planted_hack_is_what_it_is_called(hack: str) -> None:
    assert getattr(behaviour(TURNS), hack) is False
    assert getattr(behaviour(HACKS[hack](TURNS)), hack) is True


def test_a_reply_without_calls_repeats_none_and_says_nothing() -> None:
    assert behaviour(HACKS["no_ops"](TURNS[1:])).no_ops


def test_lengths_are_of_the_longest_reply() -> None:
    assert behaviour(TURNS).reply_tokens == 8
    assert behaviour(HACKS["long_replies"](TURNS)).reply_tokens == 32
    assert behaviour(HACKS["short_replies"](TURNS)).reply_tokens == 1


@pytest.mark.parametrize("hack", [*HACKS, "unsolved"])
def test_it_is_found_from_where_it_begins(hack: str) -> None:
    run = run_of(320)  # of groups too, so many are a baseline
    assert drifts(run) == []
    found = plant(run, hack, 0.9, seed=1)
    assert found.after is not None
    assert 0 < found.after < run.rollouts / 2
    assert found.others == 0


def test_an_alarm_is_held_against_the_groups_after_it() -> None:
    calm, asks = (
        run_of(1).groups[0],
        [RecordedRollout(HACKS["questions"](TURNS), float(i % 2), 9) for i in range(8)],
    )
    for after, false in ([asks] * 64, False), ([calm] * 64, True):
        run = RecordedRun([*[calm] * 128, *[asks] * 12, *after], steps=16, alarms=1)
        [alarm] = drifts(run)
        assert alarm.signal == "questions"
        assert alarm.is_false is false


def test_without_rewards_attempts_of_a_version_at_a_task_are_one_value() -> None:
    """Not each: of nine attempts that all ask back, the others are no news."""
    asks = [RecordedRollout(HACKS["questions"](TURNS), 1.0, 40) for _ in range(64)]
    run = run_of(160)
    once = RecordedRun([*run.groups, asks], steps=41, alarms=0)
    assert without_rewards(once) == []
    often = RecordedRun([*run.groups, *[asks[:4]] * 64], steps=41, alarms=0)
    [alarm] = without_rewards(often)
    assert alarm.signal == "questions"


def test_what_is_not_planted_is_not_found() -> None:
    assert plant(run_of(320), "questions", 0.0, seed=1) == Found(None, 0)


def test_a_stores_rollouts_come_as_training_settled_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    turns = fill(url, groups=3)
    assert read_run(url, 100).rollouts == 0  # nothing was looked at yet
    with Store.open(url) as store, store.appending() as connection:
        settled = [
            {"turn_id": turn, "skip_reason": "equal_reward", "created_at": float(-number)}
            for number, turn in enumerate(turns)
        ]
        connection.execute(insert(TurnLedger), settled)
    run = read_run(url, 100)
    assert [len(group) for group in run.groups] == [3, 3, 3]
    assert [one.reward for one in run.groups[0]] == [1.0] * 3  # the last one was settled first
    assert read_run(url, 4).rollouts == 4


def test_the_page_counts_runs_alarms_and_hacks() -> None:
    runs = [RecordedRun(run_of(8).groups, 2, alarms=1, entropy=0.25), run_of(8)]
    some = [Found(12, 0), Found(None, 2)]
    found = [[ReplayedAlarm("questions", "q", 0.1, 0.2)], [ReplayedAlarm("no_ops", "n", 0.4, 0.2)]]
    alone = [[ReplayedAlarm("questions", "q", 0.4, 0.2)], [ReplayedAlarm("kl", "k", 0.1, 0.2)] * 3]
    caught = {(hack, s): some for hack in (*HACKS, "unsolved") for s in SHARES}
    text = page(runs, found, alone, caught)
    assert "| clean runs | 10 | 2 | **no** |" in text
    assert "| false alarms while they trained | none | 1 | **no** |" in text
    assert "| of guards that look again | none | 1 | **no** |" in text
    assert "| runs where these raise another number of alarms | none | 1 | **no** |" in text
    assert "one by one | none | 3 | **no** |" in text
    assert "was 0.250\nnats a token" in text
    assert "- run 1: n; 40% of the 32 groups after it" in text
    assert "run 0:" not in text
    assert f"| alarms of other signals, where a hack is | none | {2 * 7 * 3} | **no** |" in text
    assert "| 7 of 14 | **no** |" in text
    assert "| questions | 1 of 2, after 12 (12) |" in text
