"""The list: its filters, its pages, what is new."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from support.cli.sample_rollouts import a_failure, coding_agent, four_alike, samples_of_one_prompt
from tracegrad.events import RolloutStarted
from tracegrad.store import Store
from tracegrad.store.read import rollout_pages
from tracegrad.store.read.rollout_pages import RolloutKey
from tracegrad.ui.pages import rollouts
from tracegrad.ui.paging import PAGE, read_key, write_key

Browse = Callable[..., TestClient]


def open_rollouts(store: Store, numbers: range, **more: object) -> None:
    store.append(
        [
            RolloutStarted(rollout_id=f"r{n:05}", task_id=f"t{n % 7}", opened_at=1000.0 + n, **more)  # type: ignore[arg-type]
            for n in numbers
        ]
    )


def ids_in(page: str) -> list[str]:
    return re.findall(r'<th scope="row" class="mono"><a href="[^"]*" title="([^"]*)"', page)


def href(page: str, text: str) -> str:
    """Where the link leads that has this text."""
    found = re.search(rf'<a [^>]*href="([^"]*)"[^>]*>{text}</a>', page)
    assert found is not None, f"no link {text!r}"
    return found[1].replace("&amp;", "&")


def test_pages_show_every_rollout_once_the_newest_first(store: Store, browse: Browse) -> None:
    open_rollouts(store, range(2 * PAGE + 5))
    client = browse()
    page = client.get("/ui/rollouts").text
    seen = ids_in(page)
    # What comes meanwhile moves nothing.
    open_rollouts(store, range(900, 910))
    while "Older" in page:
        page = client.get(href(page, "Older")).text
        seen += ids_in(page)
    assert seen == [f"r{n:05}" for n in reversed(range(2 * PAGE + 5))]
    assert ids_in(client.get(href(page, "Newest")).text)[0] == "r00909"


def test_a_time_of_no_calendar_costs_no_page(store: Store, browse: Browse) -> None:
    """Stores have had some imported: milliseconds, and worse."""
    moments = [1.7e12, 1e300, -1e300, 5.0]
    ids = [f"r{n}" for n in range(len(moments))]
    store.append(
        [
            RolloutStarted(rollout_id=each, opened_at=at)
            for each, at in zip(ids, moments, strict=True)
        ]
    )
    client = browse()
    page = client.get("/ui/rollouts")
    assert page.status_code == 200
    assert sorted(ids_in(page.text)) == ids
    for each in ids:
        assert client.get(f"/ui/rollouts/{each}").status_code == 200


def test_the_filters_are_those_of_the_command_line(store: Store, browse: Browse) -> None:
    store.append([*coding_agent(), *samples_of_one_prompt(), *four_alike(), *a_failure()])
    client = browse()

    def found(**query: str) -> int:
        return len(ids_in(client.get("/ui/rollouts", params=query).text))

    assert found() == 7
    assert found(task="sort-a-list") == 4
    assert found(agent="codex") == 6
    assert found(outcome="env_error") == 1
    assert found(outcome="budget", min_reward="1") == 1
    assert found(tag="split=train seed=7") == 1
    assert found(min_version="5") == 1
    assert found(since="1990-01-01", until="1991-01-01") == 0
    assert found(state="no_task") == 0


def test_a_wrong_filter_is_named(browse: Browse) -> None:
    client = browse()
    for query, said in (
        ({"since": "soon"}, "since: 'soon'"),
        ({"min_reward": "much"}, "min_reward: 'much' is no number"),
        ({"outcome": "fine"}, "outcome: 'fine'"),
        ({"tag": "split"}, "tag: 'split'; write key=value"),
        ({"before": "nothing"}, "incomplete"),
    ):
        answer = client.get("/ui/rollouts", params=query)
        assert answer.status_code == 400, query
        assert said in answer.text.replace("&#39;", "'")


def test_what_is_new_is_counted_by_the_filter_and_shown_when_asked_for(
    store: Store, browse: Browse
) -> None:
    open_rollouts(store, range(3))
    client = browse()
    page = client.get("/ui/rollouts?task=t1").text
    live = re.search(r'data-live="([^"]*)"', page)
    assert live is not None
    address = live[1].replace("&amp;", "&")

    def new() -> str:
        answer = client.get(address)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "retry: 3000" in answer.text
        return answer.text.split("data: ")[1].strip()

    assert new() == "0"
    open_rollouts(store, range(10, 17))
    assert new() == "1"
    open_rollouts(store, range(1000, 2000))
    assert new() == "100"


def test_a_rollout_is_found_by_the_beginning_of_its_id(store: Store, browse: Browse) -> None:
    open_rollouts(store, range(3))
    client = browse()
    answer = client.get("/ui/rollouts?q=r00002", follow_redirects=False)
    assert answer.headers["location"] == "/ui/rollouts/r00002"
    several = client.get("/ui/rollouts?q=r0")
    assert several.text.count("/ui/rollouts/r0") == 3
    assert "No rollout whose id begins with" in client.get("/ui/rollouts?q=x").text


def test_keys_of_pages_are_read_as_they_were_written() -> None:
    for key in (RolloutKey(1_763_640_000.123456, "a~b:c@d"), RolloutKey(1e-7, "")):
        assert read_key(write_key(key)) == key


def without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end after one look."""
    for function in (rollout_pages.next_rollout, rollout_pages.count_newer):
        monkeypatch.setitem(function.__kwdefaults__, "search_s", 0.0)


def test_a_neighbour_that_was_not_found_in_time_is_looked_for_in_the_list(
    store: Store, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_time(monkeypatch)
    open_rollouts(store, range(1, 1200), agent="common")
    store.append(
        [RolloutStarted(rollout_id=f"rare{n}", agent="rare", opened_at=n) for n in (5.0, 9999.0)]
    )
    client = browse()

    def leads_to(rollout_id: str, way: str, **query: str) -> str:
        path = f"/ui/rollouts/{rollout_id}/{way}"
        return client.get(path, params=query, follow_redirects=False).headers["location"]

    older = leads_to("rare9999.0", "older", agent="rare")
    assert older.startswith("/ui/rollouts?agent=rare&before=")
    assert "Look further back" in client.get(older).text or "rare5.0" in client.get(older).text
    newer = leads_to("rare5.0", "newer", agent="rare")
    assert newer.startswith("/ui/rollouts?agent=rare&before=")
    # There is one, and there is none.
    assert leads_to("r01199", "newer", agent="rare") == "/ui/rollouts/rare9999.0?agent=rare"
    assert leads_to("rare5.0", "older", agent="rare") == "/ui/rollouts?agent=rare"


def test_a_count_that_ran_out_of_time_is_asked_for_less_often(
    store: Store, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = browse()
    address = "/ui/rollouts/events?agent=nobody"
    assert "retry: 3000\n" in client.get(address).text
    without_time(monkeypatch)
    open_rollouts(store, range(1200))
    assert "retry: 30000\n" in client.get(address).text


def test_pages_are_read_in_threads_that_no_call_uses(
    browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    read = rollouts.newest_key

    def noted(connection: object) -> object:
        names.append(threading.current_thread().name)
        return read(connection)  # type: ignore[arg-type]

    monkeypatch.setattr(rollouts, "newest_key", noted)
    browse().get("/ui/rollouts")
    assert names
    assert all(name.startswith("tracegrad-page") for name in names)
