"""Whoever runs tasks asks the proxy which of them are worth it."""

from __future__ import annotations

import pytest

from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.store.events import rollout_events
from tracegrad.events import Outcome
from tracegrad.key_derivation import CALLS, EVENTS, derive_key
from tracegrad.runner.quarantine import TaskRef, check_tasks
from tracegrad.store.read.task_health import FAILS
from tracegrad.transport import ProxyRefused

RULE = {"failures": 2}


def broken(rig: ProxyWithEngine) -> None:
    """Task t fails in image img, u does too, v does not."""
    for number in range(2):
        for task in "tu":
            name = f"{task}{number}"
            events = rollout_events(
                name, task=task, outcome=Outcome.ENV_ERROR, reward=None, tags={"image": "img"}
            )
            rig.store.append(events)
    rig.store.append(rollout_events("v0", task="v", at=2000.0))


def test_the_runner_leaves_out_what_fails_and_says_why(rig: ProxyWithEngine) -> None:
    broken(rig)
    tasks = [TaskRef("t"), TaskRef("v"), TaskRef("new", image="img"), TaskRef("new", image="ok")]
    found = check_tasks(rig.url, tasks, rule=RULE)
    assert [one.task for one in found] == tasks
    assert [one.run for one in found] == [False, True, False, True]
    assert (found[0].subject, found[0].by) == ("task", FAILS)
    assert str(found[2]).startswith("image img is quarantined (rule:fails): the last 4 attempts")
    assert found[1].why == ""
    again = check_tasks(rig.url, tasks, retry=True, rule={**RULE, "retry_after_s": 0.0})
    assert [(one.run, one.is_quarantined) for one in again] == [
        (True, True),
        (True, False),
        (True, True),
        (True, False),
    ]


def test_more_tasks_than_fit_one_request_are_asked_for_in_several(rig: ProxyWithEngine) -> None:
    tasks = [TaskRef(f"t{number}") for number in range(1001)]
    assert [one.task for one in check_tasks(rig.url, tasks)] == tasks


def test_a_wrong_setting_is_refused(rig: ProxyWithEngine) -> None:
    with pytest.raises(ProxyRefused, match="failures"):
        check_tasks(rig.url, [TaskRef("t")], rule={"failures": 0})


def test_the_admin_key_alone_may_ask(engine_url: str, serve_proxy: ServeProxy) -> None:
    admin = "an-admin-key-of-this-test"
    body = {"tasks": [{"task_id": "t"}]}
    with serve_proxy(upstream=engine_url, admin_key=admin, as_admin=True) as http:
        assert http.post("/api/tasks/check", json=body).json()["tasks"][0]["run"] is True
        for scope in (CALLS, EVENTS):
            headers = {"authorization": f"Bearer {derive_key(admin, 'r', scope)}"}
            asked = http.post("/api/tasks/check", json=body, headers=headers)
            assert asked.status_code == 403, scope
