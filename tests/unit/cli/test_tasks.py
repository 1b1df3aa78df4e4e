"""`tracegrad tasks`: what there is to run, and what is set aside."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.store.events import rollout_events
from tracegrad.cli.app import app
from tracegrad.cli.options import who_decides
from tracegrad.events import Outcome
from tracegrad.store import Store
from tracegrad.store.ledger.quarantine import apply_rule
from tracegrad.store.read.task_health import FAILS, QuarantineRule, Subject


def tasks(url: str, *arguments: str, columns: int = 100) -> Result:
    environment = {"TRACEGRAD_STORE": url, "TERM": "dumb", "COLUMNS": str(columns)}
    return CliRunner().invoke(app, ["tasks", *arguments], env=environment)


def listed(url: str, *arguments: str) -> Any:
    result = tasks(url, "ls", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def filled(store: Store) -> Store:
    """good: half of it solved; broken: eight failures, of which a rule has made a quarantine."""
    for number in range(8):
        store.append(
            rollout_events(
                f"b{number}",
                task="broken",
                at=1000.0 + number,
                outcome=Outcome.ENV_ERROR,
                reward=None,
                tags={"image": "img"},
            )
        )
        store.append(
            rollout_events(f"g{number}", task="good", at=2000.0 + number, reward=number % 2)
        )
    store.append(rollout_events("alone", task=None, at=5000.0))
    return store


def test_tasks_with_their_attempts_and_those_that_are_set_aside_first(
    filled: Store, url: str
) -> None:
    apply_rule(filled, [Subject("task", "broken")])
    broken, good = listed(url)["tasks"]
    assert (broken["task_id"], broken["state"], broken["by"]) == ("broken", "quarantined", FAILS)
    assert broken["outcomes"] == {"env_error": 8}
    assert broken["evidence"]["attempts"] == 8
    assert (good["task_id"], good["rollouts"], good["pass_rate"], good["state"]) == (
        "good",
        8,
        0.5,
        "ok",
    )
    shown = tasks(url, "ls").output
    lines = shown.splitlines()
    assert lines[1].split()[0] == "broken"
    assert lines[1].split()[-1] == "quarantined"
    assert f"task broken: quarantined by {FAILS}" in shown
    assert "the last 8 attempts failed (8 env_error)" in shown
    for columns in (40, 60):
        assert all(
            len(line) <= columns for line in tasks(url, "ls", columns=columns).output.splitlines()
        )


def test_what_the_rule_would_set_aside_is_suspect_until_somebody_asks(
    filled: Store, url: str
) -> None:
    assert [row["state"] for row in listed(url)["tasks"]] == ["suspect", "ok"]
    assert [row["state"] for row in listed(url, "--failures", "9")["tasks"]] == ["ok", "ok"]
    [row] = listed(url, "--health", "suspect")["tasks"]
    assert row["task_id"] == "broken"
    assert "no tasks match" in tasks(url, "ls", "--health", "quarantined").output
    assert tasks(url, "ls", "--health", "ill").exit_code == 2


def test_an_image_is_named_below_the_tasks(filled: Store, url: str) -> None:
    filled.append(
        rollout_events(
            "other", task="other", at=1100.0, outcome=Outcome.ENV_ERROR, tags={"image": "img"}
        )
    )
    apply_rule(filled, [Subject("image", "img")], QuarantineRule())
    [image] = listed(url)["images"]
    assert (image["image"], image["state"]) == ("img", "quarantined")
    assert "image img: quarantined by rule:fails" in tasks(url, "ls").output
    released = tasks(url, "release", "img", "--image", "--why", "built again")
    assert released.output.strip() == f"image img: released by {who_decides()}"
    assert listed(url)["images"][0]["state"] == "ok"


def test_people_set_aside_and_release_and_say_why(filled: Store, url: str) -> None:
    done = tasks(url, "quarantine", "good", "--why", "its tests are wrong")
    assert done.output.strip() == f"task good: quarantined by {who_decides()}"
    first = listed(url)["tasks"][0]
    assert (first["task_id"], first["why"]) == ("good", "its tests are wrong")
    again = tasks(url, "quarantine", "good", "--why", "once more")
    assert (again.exit_code, "task good is quarantined already" in again.output) == (1, True)
    unknown = tasks(url, "quarantine", "typo", "--why", "x")
    assert (unknown.exit_code, "no rollout is of task typo" in unknown.output) == (1, True)
    assert tasks(url, "quarantine", "good").exit_code == 2, "without a reason"
    given = tasks(url, "release", "good", "--why", "mended", "--json")
    assert json.loads(given.stdout)["kind"] == "release"
    assert {row["state"] for row in listed(url, "--task", "good")["tasks"]} == {"ok"}


def test_an_empty_store_says_so(store: Store, url: str) -> None:
    assert tasks(url, "ls").output.strip() == "no tasks yet"
    assert listed(url) == {"tasks": [], "images": []}
