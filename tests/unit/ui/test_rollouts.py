"""The list: its filters, its pages, what is new."""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.testclient import TestClient

from support.cli.sample_rollouts import a_failure, coding_agent, four_alike, samples_of_one_prompt
from tracegrad.events import RolloutStarted
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.read.rollout_pages import RolloutKey, page_of_rollouts
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


def test_rollouts_of_one_moment_are_all_paged_through(store: Store) -> None:
    store.append([RolloutStarted(rollout_id=f"r{n:03}", opened_at=5.0) for n in range(25)])
    seen: list[str] = []
    key = None
    with store.reading() as connection:
        while True:
            page = page_of_rollouts(connection, RolloutFilter(), before=key, limit=4)
            seen += [row.rollout_id for row in page.rows]
            if not page.more:
                break
            key = RolloutKey(5.0, seen[-1])
    assert seen == [f"r{n:03}" for n in reversed(range(25))]


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


def test_a_search_that_few_pass_says_how_far_it_came_and_goes_on(store: Store) -> None:
    open_rollouts(store, range(1, 3000))
    store.append([RolloutStarted(rollout_id="rare", agent="rare", opened_at=1000.0)])
    wanted = RolloutFilter(agent="rare")
    with store.reading() as connection:
        # No time at all: one look.
        page = page_of_rollouts(connection, wanted, limit=10, search_s=0.0)
        assert not page.rows
        assert page.more
        looks = 1
        while not page.rows:
            assert page.searched_to is not None
            key = RolloutKey(page.searched_to, "")
            page = page_of_rollouts(connection, wanted, before=key, limit=10, search_s=0.0)
            looks += 1
        assert [row.rollout_id for row in page.rows] == ["rare"]
        assert looks > 3
        whole = page_of_rollouts(connection, wanted, limit=10, clock=lambda: 0.0)
        assert [row.rollout_id for row in whole.rows] == ["rare"]
        assert not whole.more


def test_more_of_one_moment_than_a_search_looks_at_do_not_stop_it(store: Store) -> None:
    store.append([RolloutStarted(rollout_id=f"r{n:05}", opened_at=5.0) for n in range(1500)])
    store.append([RolloutStarted(rollout_id="old", agent="rare", opened_at=4.0)])
    key, found = None, list[str]()
    with store.reading() as connection:
        for _ in range(10):
            page = page_of_rollouts(
                connection, RolloutFilter(agent="rare"), before=key, limit=9, search_s=0.0
            )
            found += [row.rollout_id for row in page.rows]
            if page.searched_to is None:
                break
            key = RolloutKey(page.searched_to, "")
    assert found == ["old"]


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
