"""`tracegrad rollouts pass`: by version, task, agent and tag, in both databases."""

from __future__ import annotations

import pytest

from support.cli.run_rollouts import in_order, printed, printed_json, run
from support.cli.tried_rollouts import tried_samples
from tracegrad.store import Store


@pytest.fixture
def tried(url: str) -> str:
    with Store.open(url) as store:
        tried_samples(store)
    return url


def test_by_version_the_newest_first(tried: str) -> None:
    newer, older = printed_json(tried, "pass")
    assert (newer["version"], older["version"]) == (2, 1)
    assert (newer["attempts"], newer["successes"], newer["unknown"]) == (8, 5, 0)
    assert newer["success"] == 0.625
    assert newer["pass"]["1"] == {"value": 0.625, "tasks": 2, "too_few": 0}
    assert newer["pass"]["4"]["value"] == 1.0
    # Two turns of two tokens each.
    assert newer["tokens_per_success"] == pytest.approx(8 * 4 / 5)
    assert (older["attempts"], older["unknown"]) == (5, 1)
    assert older["pass"]["1"]["value"] == pytest.approx((2 / 3 + 0) / 2)
    assert older["pass"]["4"] == {"value": None, "tasks": 0, "too_few": 2}
    text = printed(tried, "pass")
    in_order(
        text,
        [
            "version tasks attempts unknown success pass@1 pass@4 tokens/success",
            "2 2 8 62.5% 62.5% 100.0% 6.4",
            "1 2 5 1 40.0% 33.3% 10",
            "pass@4 is without 2 tasks of fewer than 4 attempts",
        ],
    )


def test_by_task_agent_and_tag(tried: str) -> None:
    by_task = printed_json(tried, "pass", "--by", "task", "--k", "2")
    assert {row["task"]: row["attempts"] for row in by_task} == {"easy": 7, "hard": 6}
    assert list(by_task[0]["pass"]) == ["2"]
    by_tag = printed_json(tried, "pass", "--by", "tag:split")
    assert {row["tag:split"] for row in by_tag} == {"test", "train"}
    assert sum(row["attempts"] for row in by_tag) == 13
    [by_agent] = printed_json(tried, "pass", "--by", "agent")
    assert by_agent["agent"] is None
    [unknown] = printed_json(tried, "pass", "--by", "tag:nothing")
    assert (unknown["tag:nothing"], unknown["attempts"]) == (None, 13)


def test_filters_and_another_threshold(tried: str) -> None:
    [row] = printed_json(tried, "pass", "--tag", "split=test", "--min-version", "2")
    assert row["attempts"] == 4
    [row] = printed_json(tried, "pass", "--tag", "split=test", "--by", "tag:split")
    assert row["tag:split"] == "test"
    newer, _ = printed_json(tried, "pass", "--success", "2")
    assert (newer["successes"], newer["tokens_per_success"]) == (0, None)
    text = printed(tried, "pass", "--by", "task", "--limit", "1")
    assert "… and 1 more (--limit)" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--by", "colour"], "use version, task, agent or tag:KEY"),
        (["--by", "tag:"], "use version, task, agent or tag:KEY"),
        (["--k", "1,x"], "write whole numbers, such as 1,4,8"),
        (["--k", "0"], "write whole numbers, such as 1,4,8"),
    ],
)
def test_wrong_use_is_named(tried: str, arguments: list[str], words: str) -> None:
    found = run(tried, "pass", *arguments, columns=200)
    assert found.exit_code == 2
    assert words in found.output


def test_an_empty_store_says_so(url: str) -> None:
    Store.open(url).close()
    assert "no rollouts" in printed(url, "pass")
