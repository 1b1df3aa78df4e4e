"""The list of tasks: pages, figures, what is set aside, and decisions by forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

import pytest
from starlette.testclient import TestClient

from support.store.events import rollout_events
from tracegrad.events import Event, Outcome, RolloutStarted
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import GroupCommitWriter, Store
from tracegrad.store.read.task_health import Subject, last_decisions, quarantined
from tracegrad.ui.pages.tasks import LOOKED_AT, MOST_REASON, PAGE, path_of

from .conftest import token_in

Browse = Callable[..., TestClient]
KEY = "an-admin-key-of-32-random-characters"


def open_tasks(store: Store, count: int) -> None:
    events: list[Event] = [
        RolloutStarted(rollout_id=f"r{n:05}", task_id=f"t{n:03}", opened_at=1000.0 + n)
        for n in range(count)
    ]
    store.append(events)


def tasks_in(page: str) -> list[str]:
    return re.findall(r'<th scope="row" class="task"><a href="/ui/tasks/([^"]*)"', page)


def older(page: str) -> str:
    found = re.search(r'<a [^>]*href="([^"]*)"[^>]*rel="next"', page)
    assert found is not None
    return unescape(found[1])


def row_of(page: str, name: str) -> str:
    """The text of a task's row, its tags taken away."""
    [found] = [row for row in re.findall(r"<tr>(.*?)</tr>", page, re.S) if f">{name}</a>" in row]
    return " ".join(re.sub(r"<[^>]*>", " ", found).split())


def decide(client: TestClient, **fields: str) -> object:
    page = client.get("/ui/tasks").text
    token = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
    csrf = token[1] if token else client.cookies["tracegrad_form"]
    return client.post("/ui/tasks", data={"csrf": csrf, **fields}, follow_redirects=False)


def test_an_empty_store_says_what_appears_here(browse: Browse) -> None:
    answer = browse().get("/ui/tasks")
    assert answer.status_code == 200
    assert "No tasks yet" in answer.text
    assert 'aria-current="page">Tasks' in answer.text
    assert "Set aside" not in answer.text


def test_pages_have_every_task_once_that_with_the_newest_rollout_first(
    store: Store, browse: Browse
) -> None:
    open_tasks(store, 2 * PAGE + 3)
    store.append([RolloutStarted(rollout_id="late", task_id="t007", opened_at=9000.0)])
    client = browse()
    page = client.get("/ui/tasks").text
    seen = tasks_in(page)
    assert len(seen) == PAGE
    while 'rel="next"' in page:
        page = client.get(older(page)).text
        seen += tasks_in(page)
    assert seen == ["t007", *(f"t{n:03}" for n in reversed(range(2 * PAGE + 3)) if n != 7)]
    assert client.get("/ui/tasks?before=x").status_code == 400


def test_figures_are_those_of_the_attempts(store: Store, browse: Browse) -> None:
    for n, (outcome, reward) in enumerate(
        [
            (Outcome.COMPLETED, 1.0),
            (Outcome.COMPLETED, 0.5),
            (Outcome.COMPLETED, 0.0),
            (Outcome.AGENT_ERROR, 0.25),
            (None, None),
        ]
    ):
        store.append(rollout_events(f"r{n}", task="t", at=1e9 + n, outcome=outcome, reward=reward))
    page = browse().get("/ui/tasks").text
    # 2 of 4 rewards are 0.5 or more; their mean is 1.75 / 4.
    row = row_of(page, "t")
    assert row.startswith("t ok 5 50.0% 0.4375 3 completed 1 agent error 1 open")
    assert 'width="50.0"' in page
    assert f"newest {LOOKED_AT}" not in page


def test_the_list_and_the_task_count_the_same_attempts(store: Store, browse: Browse) -> None:
    """What an environment's failure was rewarded with says nothing of the policy."""
    for n in range(8):
        failed = {"outcome": Outcome.ENV_ERROR, "reward": 0.0} if n % 2 else {"reward": 1.0}
        store.append(rollout_events(f"r{n}", task="sum", at=1e9 + n, **failed))
    store.append(rollout_events("empty", task="sum", at=2e9, reward=0.0, turns=0))
    client = browse()
    listed = client.get("/ui/tasks").text
    assert "100.0%" in listed
    assert "100.0%" in client.get("/ui/tasks/sum").text
    assert "50.0%" not in listed


def test_a_task_without_a_name_has_a_page(store: Store, browse: Browse) -> None:
    client = browse()
    assert "Tasks" in client.get("/ui/tasks?task=").text, "the form as it was"
    store.append(rollout_events("r", task=""))
    assert path_of("") == "/ui/tasks?task="
    assert 'href="/ui/rollouts/r' in client.get("/ui/tasks?task=").text


def test_figures_of_many_attempts_are_of_the_newest_and_say_so(
    store: Store, browse: Browse
) -> None:
    for n in range(LOOKED_AT + 20):
        store.append(rollout_events(f"r{n:04}", task="t", at=1e9 + n, reward=float(n >= 20)))
    page = browse().get("/ui/tasks").text
    assert row_of(page, "t").startswith(f"t ok {LOOKED_AT + 20} 100.0% 1 {LOOKED_AT} completed")
    assert f"those of the newest {LOOKED_AT}" in page


def test_a_task_that_fails_is_suspect_and_says_why(store: Store, browse: Browse) -> None:
    store.append(rollout_events("good", task="other", at=1e9 + 50))
    for n in range(8):
        failed = rollout_events(f"r{n}", task="t", at=1e9 + n, outcome=Outcome.ENV_ERROR)
        store.append(failed)
    row = row_of(browse().get("/ui/tasks").text, "t")
    assert "t suspect 8" in row
    assert "the last 8 attempts failed (8 env_error)" in row


def test_a_task_is_set_aside_by_a_form_and_released(store: Store, browse: Browse) -> None:
    store.append(rollout_events("r", task="a/b", at=1e9))
    client = browse()
    fields = {"subject": "task", "id": "a/b", "reason": "it leaks\r\nits answer "}
    answer = decide(client, kind="quarantine", **fields)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/tasks/a%2Fb")  # type: ignore[attr-defined]
    subject = Subject("task", "a/b")
    with store.reading() as connection:
        decision = last_decisions(connection, [subject])[subject]
    assert (decision.by, decision.reason) == ("ui", "it leaks\nits answer")
    page = client.get("/ui/tasks").text
    assert page.index("Set aside") < page.index("All, by their newest rollout")
    assert page.count("it leaks its answer") == 2
    again = decide(client, kind="quarantine", **fields)
    assert again.status_code == 400  # type: ignore[attr-defined]
    assert "task a/b is quarantined already" in again.text  # type: ignore[attr-defined]
    assert decide(client, kind="release", **fields).status_code == 303  # type: ignore[attr-defined]
    with store.reading() as connection:
        assert quarantined(connection) == []
    assert "Released because: it leaks its answer" in client.get("/ui/tasks/a%2Fb").text


def test_an_image_is_released_from_the_list(store: Store, browse: Browse) -> None:
    store.append(rollout_events("r", task="t", tags={"image": "img:1"}))
    client = browse()
    fields = {"subject": "image", "id": "img:1", "reason": "broken"}
    assert decide(client, kind="quarantine", **fields).status_code == 303  # type: ignore[attr-defined]
    page = client.get("/ui/tasks").text
    assert "Release this image" in page
    assert token_in(page)
    released = decide(client, kind="release", **fields)
    assert released.headers["location"] == "/ui/tasks"  # type: ignore[attr-defined]
    assert "img:1" not in client.get("/ui/tasks").text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reason": "  "}, "reason: is empty"),
        ({"reason": "x" * (MOST_REASON + 1)}, f"{MOST_REASON:,} at most"),
        ({"id": "nobody"}, "no rollout is of task nobody"),
        ({"id": ""}, "no rollout is of task"),
        ({"kind": "delete"}, "use quarantine or release"),
        ({"subject": "rollout"}, "a task or an image"),
        ({"reason": "a\0b"}, "NUL"),
        ({"kind": "release"}, "is not quarantined"),
    ],
)
def test_what_is_wrong_with_a_decision_is_one_line(
    store: Store, browse: Browse, change: dict[str, str], said: str
) -> None:
    store.append(rollout_events("r", task="t"))
    fields = {"subject": "task", "id": "t", "kind": "quarantine", "reason": "why"} | change
    answer = decide(browse(), **fields)
    assert answer.status_code == 400  # type: ignore[attr-defined]
    problems = re.findall(r'<p class="problem"[^>]*>([^<]*)</p>', answer.text)  # type: ignore[attr-defined]
    assert len(problems) == 1
    assert said in unescape(problems[0])
    with store.reading() as connection:
        assert quarantined(connection) == []


def test_a_form_without_its_token_decides_nothing(store: Store, browse: Browse) -> None:
    store.append(rollout_events("r", task="t"))
    fields = {"subject": "task", "id": "t", "kind": "quarantine", "reason": "why", "csrf": "0"}
    assert browse().post("/ui/tasks", data=fields).status_code == 403
    with store.reading() as connection:
        assert quarantined(connection) == []


def test_where_a_key_is_asked_for_only_a_session_decides(store: Store) -> None:
    """Through the whole proxy."""
    store.append(rollout_events("r", task="t"))
    settings = ProxySettings(admin_key=KEY)  # type: ignore[arg-type]
    app = create_app(settings, store=store, writer=GroupCommitWriter(store))
    fields = {"subject": "task", "id": "t", "kind": "quarantine", "reason": "why"}
    with TestClient(app, base_url="http://127.0.0.1", headers={"accept": "text/html"}) as client:
        token = token_in(client.get("/ui/login").text)
        refused = client.post("/ui/tasks", data={"csrf": token, **fields}, follow_redirects=False)
        assert refused.status_code in (401, 403)
        with store.reading() as connection:
            assert quarantined(connection) == []
        client.post("/ui/login", data={"csrf": token, "key": KEY})
        token = token_in(client.get("/ui/tasks/t").text)
        answer = client.post("/ui/tasks", data={"csrf": token, **fields}, follow_redirects=False)
        assert answer.status_code == 303
    subject = Subject("task", "t")
    with store.reading() as connection:
        assert last_decisions(connection, [subject])[subject].by == "ui:admin_key"


def test_a_task_is_found_by_its_id(store: Store, browse: Browse) -> None:
    open_tasks(store, 1)
    answer = browse().get("/ui/tasks?task=t000", follow_redirects=False)
    assert answer.headers["location"] == path_of("t000") == "/ui/tasks/t000"
    assert browse().get("/ui/tasks?task=").status_code == 200
