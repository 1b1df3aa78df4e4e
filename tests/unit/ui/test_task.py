"""One task: its rates, its attempts, and some of them side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from support.store.events import make_turn, rollout_events
from support.ui.untrusted_texts import PAYLOADS
from tracegrad.events import Json, Outcome, RolloutFinished, RolloutStarted
from tracegrad.store import Store
from tracegrad.store.read.rollouts import list_rollouts
from tracegrad.ui.pages.comparison import CHARACTERS, MOST, WINDOW, compare
from tracegrad.ui.pages.task import LISTED, RATED, read_success
from tracegrad.ui.pages.tasks import path_of
from tracegrad.ui.paging import WrongLink

Browse = Callable[..., TestClient]


def conversation(store: Store, rollout_id: str, replies: list[str], **more: Any) -> None:
    """Each turn asks for a number, and is answered with one of the replies."""
    store.append(
        [RolloutStarted(rollout_id=rollout_id, task_id="t", opened_at=more.pop("at", 1e9))]
    )
    messages: list[Json] = []
    behind = None
    for number, text in enumerate(replies):
        messages.append({"role": "user", "content": f"question {number}"})
        reply = {"role": "assistant", "content": text}
        behind = make_turn(
            f"{rollout_id}.{number}",
            rollout_id,
            parent=behind,
            request={"model": "m", "messages": list(messages)},
            response={"choices": [{"index": 0, "message": reply}]},
        )
        store.append([behind])
        messages.append(reply)
    store.append([RolloutFinished(rollout_id=rollout_id, outcome=Outcome.COMPLETED)])


def cells(page: str, caption: str) -> list[list[str]]:
    """The rows of a table's body as texts."""
    [table] = [one for one in re.findall(r"<table.*?</table>", page, re.S) if caption in one]
    body = table.partition("<tbody>")[2]
    return [
        [
            " ".join(re.sub(r"<[^>]*>", " ", cell).split())
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
        ]
        for row in re.findall(r"<tr>(.*?)</tr>", body, re.S)
    ]


def test_pass_rates_by_version_are_those_of_the_formula(store: Store, browse: Browse) -> None:
    # Version 1: 1 of 4 succeeds, so pass@4 is 1. Version 2: 2 of 8; pass@4 is 1 - C(6,4)/C(8,4).
    rewards = [(1, 1.0), *[(1, 0.0)] * 3, *[(2, 0.5)] * 2, *[(2, 0.25)] * 6, (2, None)]
    for n, (version, reward) in enumerate(rewards):
        attempt = rollout_events(f"r{n:02}", task="t", at=1e9 + n, version=version, reward=reward)
        store.append(attempt)
    client = browse()
    rows = cells(client.get("/ui/tasks/t").text, "pass@k")
    # Of all: 3 of 12; 1 - C(9,4)/C(12,4) and 1 - C(9,8)/C(12,8).
    assert rows == [
        ["all", "25.0%", "74.5%", "98.2%", "3", "12", "1", "0.2917"],
        ["2", "25.0%", "78.6%", "100.0%", "2", "8", "1", "0.3125"],
        ["1", "25.0%", "100.0%", "–", "1", "4", "0", "0.25"],
    ]
    lower = cells(client.get("/ui/tasks/t?success=0.25").text, "pass@k")
    assert lower[0][:2] == ["all", "75.0%"]
    assert client.get("/ui/tasks/t?success=much").status_code == 400


def test_a_threshold_is_a_finite_number() -> None:
    assert read_success(None) == 0.5
    assert read_success("-1") == -1.0
    for text in ("nan", "inf", "x", "1,5"):
        with pytest.raises(WrongLink, match="success"):
            read_success(text)


def test_many_attempts_are_of_the_newest(store: Store, browse: Browse) -> None:
    for n in range(RATED + 3):
        store.append(rollout_events(f"r{n:04}", task="t", at=1e9 + n, turns=1))
    page = browse().get("/ui/tasks/t").text
    assert f"Of the newest {RATED} attempts" in page
    assert cells(page, "pass@k")[0][5] == str(RATED)
    attempts = cells(page, "Attempts, the newest first")
    assert [row[1] for row in attempts] == [
        f"r{n:04}" for n in range(RATED + 2, RATED + 2 - LISTED, -1)
    ]


def test_attempts_say_how_they_ended(store: Store, browse: Browse) -> None:
    conversation(store, "one", ["first", "the  last\nword " * 40])
    [row] = cells(browse().get("/ui/tasks/t").text, "Attempts, the newest first")
    assert row[1:7] == ["one", "completed", "–", "0", "2", "4"]
    assert row[9].startswith("the last word the last word")
    assert row[9].endswith("…")


def test_side_by_side_the_first_difference_is_marked(store: Store, browse: Browse) -> None:
    conversation(store, "a", ["same", "yes", "end"])
    conversation(store, "b", ["same", "no"])
    page = browse().get("/ui/tasks/t?compare=a&compare=b").text
    assert "They differ first in turn 1." in page
    assert re.findall(r'class="compared-turn( differs)?" id="turn-(\d)"', page) == [
        ("", "0"),
        (" differs", "1"),
        ("", "2"),
    ]
    assert page.count("first difference") == 1
    assert page.count("Ended before.") == 1
    assert page.count(" checked>") == 2 + 1  # and the switch of the keys
    same = browse().get("/ui/tasks/t?compare=a&compare=a").text
    assert "They differ" not in same


def test_attempts_that_say_the_same_do_not_differ(store: Store, browse: Browse) -> None:
    for name in "ab":
        conversation(store, name, ["same"] * (WINDOW + 2))
    page = browse().get("/ui/tasks/t?compare=a&compare=b").text
    assert f"No difference in the first {WINDOW} turns." in page
    later = re.search(r'href="([^"]*)"[^>]*>Later turns', page)
    assert later is not None
    second = browse().get(later[1].replace("&amp;", "&")).text
    assert f"No difference in the first {WINDOW + 2} turns." in second
    assert re.findall(r'id="turn-(\d+)"', second) == ["10", "11"]
    assert "Earlier turns" in second


def test_what_cannot_be_compared_says_so(store: Store, browse: Browse) -> None:
    conversation(store, "a", ["x"])
    conversation(store, "ab", ["x"])
    store.append(rollout_events("foreign", task="other"))
    client = browse()
    many = "&".join(f"compare=r{n}" for n in range(MOST + 1))
    for query, status, said in [
        (many, 400, f"{MOST} fit beside each other"),
        ("compare=foreign", 400, "no attempt at this task"),
        ("compare=nobody", 404, "no rollout nobody"),
        ("compare=", 404, "no rollout"),
        ("compare=a&turn=x", 400, "turn"),
    ]:
        answer = client.get(f"/ui/tasks/t?{query}")
        assert (answer.status_code, said in answer.text) == (status, True), query
    assert client.get("/ui/tasks/t?compare=a&turn=999999999").status_code == 200


def test_texts_that_are_compared_have_bounded_room(store: Store, browse: Browse) -> None:
    for name in "abcd":
        conversation(store, name, [f"{name} " * 150_000] * 3)
    query = "&".join(f"compare={name}" for name in "abcd")
    page = browse().get(f"/ui/tasks/t?{query}").text
    assert len(page) < 1.5 * CHARACTERS
    with store.reading() as connection:
        small = compare(connection, "t", ["a", "b"], 0, characters=0)
    assert all(side and side.reply for row in small.turns for side in row.sides)


HOSTILE = [
    *("a/b", "/a//b/", "a b", "100%", "%2F", "%25", "a?b#c", "é/ü", "日本", "a\\b", "a&b=c", "+"),
    *(".", "..", "../x", "a/../b", "./a", "line\nend", "end\n", "\ttab", "events", "'\"<x>", "..."),
]


async def test_every_task_has_an_address(store: Store, browse: Browse) -> None:
    for number, task_id in enumerate([*HOSTILE, *PAYLOADS]):
        store.append(rollout_events(f"r{number:03}", task=task_id, at=1e9 + number))
    with store.reading() as connection:
        stored = {str(one.task_id) for one in list_rollouts(connection, limit=None)}
    assert len(stored) == len({*HOSTILE, *PAYLOADS})
    # Starlette's test client decodes a path twice, which servers do not.
    transport = httpx.ASGITransport(app=browse().app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        lists = ["/ui/rollouts", "/ui/rollouts?before=1000000019.5~"]
        pages = [(await client.get(path)).text for path in lists]
        links = {unescape(link) for page in pages for link in re.findall(r'href="([^"]*)"', page)}
        for task_id in stored:
            page = await client.get(path_of(task_id))
            assert page.status_code == 200, task_id
            # Of this task and of no other.
            assert len(cells(page.text, "Attempts, the newest first")) == 1, task_id
            assert path_of(task_id) in links


def test_a_task_that_is_not_there(browse: Browse) -> None:
    answer = browse().get("/ui/tasks/no/body")
    assert answer.status_code == 404
    assert "no rollout is of the task no/body" in answer.text
    assert browse().get("/ui/tasks/", follow_redirects=False).status_code == 303
