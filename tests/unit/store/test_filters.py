"""One form of choosing rollouts, the same in both databases and in every command."""

from __future__ import annotations

import itertools
import math
import time
from datetime import datetime
from typing import Any

import pytest
import typer

from support.store.events import rollout_events
from tracegrad.cli.options import parse_time, rollout_filter
from tracegrad.events import Outcome, Reward
from tracegrad.store import ALL, RolloutFilter, Store


@pytest.fixture
def filled(store: Store) -> Store:
    """a: version 1, reward 0; b: version 2, reward 1; c: version 3, reward revised from 1 to 0.5;
    d: open, no reward, no turns, held out."""
    store.append(rollout_events("a", at=10, reward=0.0, version=1))
    store.append(rollout_events("b", at=20, reward=1.0, version=2, task="other"))
    store.append(rollout_events("c", at=30, reward=1.0, version=3, outcome=Outcome.BUDGET))
    store.append([Reward(rollout_id="c", value=0.5, created_at=99)])
    store.append(rollout_events("d", at=40, reward=None, outcome=None, turns=0, held_out=True))
    return store


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, "dcba"),
        ({"since": 20}, "dcb"),
        ({"until": 20}, "a"),
        ({"since": 20, "until": 40}, "cb"),
        ({"min_reward": 0.5}, "cb"),
        ({"max_reward": 0.5}, "ca"),
        ({"min_reward": 0.25, "max_reward": 0.75}, "c"),
        ({"min_version": 2}, "cb"),
        ({"max_version": 2}, "ba"),
        ({"min_version": 2, "max_version": 2}, "b"),
        ({"outcome": "open"}, "d"),
        ({"outcome": "budget"}, "c"),
        ({"task": "other"}, "b"),
        ({"task": "other", "max_version": 1}, ""),
        ({"held_out": True}, "d"),
        ({"held_out": False}, "cba"),
        ({"state": "held_out"}, "d"),
    ],
)
def test_a_filter_finds_what_it_says(filled: Store, asked: dict[str, Any], found: str) -> None:
    rows = filled.rollouts(RolloutFilter(**asked))
    assert "".join(row.rollout_id for row in rows) == found


def test_more_conditions_never_find_more(filled: Store) -> None:
    conditions: list[dict[str, Any]] = [
        {"since": 15},
        {"until": 35},
        {"min_reward": 0.4},
        {"max_version": 2},
        {"task": "task"},
    ]

    def ids(some: tuple[dict[str, Any], ...]) -> set[str]:
        merged = {key: value for one in some for key, value in one.items()}
        return {row.rollout_id for row in filled.rollouts(RolloutFilter(**merged))}

    for pair in itertools.combinations(conditions, 2):
        assert ids(pair) == ids(pair[:1]) & ids(pair[1:])


def test_nothing_asked_is_everything() -> None:
    assert ALL.matches_all
    assert RolloutFilter(tags={}).matches_all
    assert not RolloutFilter(since=0).matches_all


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"outcome": "good"}, "outcome: 'good'; use open, completed"),
        ({"since": math.nan}, "since: nan is no finite number"),
        ({"max_reward": math.inf}, "max_reward: inf is no finite number"),
    ],
)
def test_a_wrong_condition_names_its_field(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutFilter(**asked)


def test_times_may_be_told_in_several_ways() -> None:
    local = datetime(2026, 11, 20, 14, 30)  # noqa: DTZ001 (people mean their own clock)
    assert parse_time("2026-11-20T14:30", "--since") == local.timestamp()
    assert parse_time("2026-11-20 14:30:00+00:00", "--since") == 1795185000.0
    assert parse_time("1795185000.5", "--since") == 1795185000.5
    assert parse_time(None, "--since") is None
    ago = parse_time("1.5h", "--since")
    assert ago is not None
    assert abs(time.time() - 5400 - ago) < 5


@pytest.mark.parametrize(
    ("asked", "option", "reason"),
    [
        ({"since": "yesterday"}, "--since", "'yesterday'; write a date"),
        ({"until": "12"}, "--until", "'12'; write a date"),
        ({"outcome": "good"}, "--outcome", "'good'; use open"),
        ({"tag": ["x"]}, "--tag", "'x'; write key=value"),
        ({"min_reward": math.nan}, "--min-reward", "nan is no finite number"),
    ],
)
def test_a_wrong_option_is_named(asked: dict[str, Any], option: str, reason: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        rollout_filter(**asked)
    assert caught.value.param_hint == option
    assert reason in caught.value.message


def test_of_a_hash_the_beginning_is_enough_and_of_no_other_name(store: Store) -> None:
    tasks = {
        "hash": "20240101abcdef00",
        "other": "20240101abcdef01",
        "named": "20240101-monday!",  # as long as a hash
        "short": "20240101",
    }
    for name, task in tasks.items():
        store.append(rollout_events(name, task=task))

    def found(task: str) -> set[str]:
        return {row.rollout_id for row in store.rollouts(RolloutFilter(task=task))}

    assert found("20240101") == {"hash", "other", "short"}
    assert found("20240101abcdef0") == {"hash", "other"}
    assert found(tasks["hash"]) == {"hash"}
    assert found("2024010") == found("20240101-") == found("20240101ABC") == set()
