"""A rollout's page: conversation, rewards, forks, time, tokens; windows of long ones."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from bench.ui.long_rollout import LONG, add_long_rollout
from starlette.testclient import TestClient

from support.cli.sample_rollouts import (
    coding_agent,
    four_alike,
    samples_of_one_prompt,
    spans_alone,
    trained_samples,
)
from support.store.ledger_fixtures import fill, lease
from support.ui.large_turns import large_turn
from tracegrad.events import Json, Reward
from tracegrad.inspect.rollout_time import STAGES
from tracegrad.store import Ledger, Store
from tracegrad.store.read.rollout_outline import turn_tokens
from tracegrad.store.types import COMPOSED_SOURCE
from tracegrad.ui.environment import STATIC_FOLDER
from tracegrad.ui.pages import rollout as rollout_page
from tracegrad.ui.pages.messages import FIRST_AND_LAST, shown_text
from tracegrad.ui.pages.rollout import WINDOW
from tracegrad.ui.pages.tokens import PAGE, credit_class

Browse = Callable[..., TestClient]
CODING = "0193c0de0001" + "0" * 20


def text_of(page: str) -> str:
    """What a reader sees, in one line."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).replace("&#39;", "'").split())


def test_a_rollout_is_a_conversation_with_its_rewards_and_forks(
    store: Store, browse: Browse
) -> None:
    store.append(coding_agent())
    answer = browse().get(f"/ui/rollouts/{CODING}")
    assert answer.status_code == 200
    said = text_of(answer.text)
    assert "The test suite fails since yesterday" in said
    assert "thoughts The first item is left out." in said
    # A call is its tool with its arguments by name, not JSON.
    assert "calls read_file path shop/cart.py" in said
    assert "3 messages as in turn 0" in said
    assert "0 reward the rollout admin_key (tests)" in said
    assert "revised by a later one" in said
    assert "Fork: edited history." in said
    assert "It would have continued turn 3." in said
    assert "not trainable: greedy" in said
    assert "Turns 20 Tokens" in said
    for number in range(20):
        assert f'id="turn-{number}"' in answer.text
    # The tree's branches are listed with why they begin.
    assert "Turn tree" in said
    assert "new conversation" in said


def test_the_beginning_of_an_id_is_enough_and_a_wrong_one_is_not_found(
    store: Store, browse: Browse
) -> None:
    store.append(coding_agent())
    client = browse()
    assert client.get(f"/ui/rollouts/{CODING[:14]}").status_code == 200
    assert client.get("/ui/rollouts/nobody").status_code == 404
    assert client.get(f"/ui/rollouts/{CODING}?turn=x").status_code == 400
    assert client.get(f"/ui/rollouts/{CODING}/turns/99/tokens").status_code == 404


def test_rollouts_beside_it_are_those_of_the_list_it_was_opened_from(
    store: Store, browse: Browse
) -> None:
    store.append([*coding_agent(), *samples_of_one_prompt(), *spans_alone(), *four_alike()])
    client = browse()

    def beside(rollout: str, where: str, query: str = "") -> str:
        path = f"/ui/rollouts/{rollout}/{where}{query}"
        return client.get(path, follow_redirects=False).headers["location"]

    second, last = "0193c0de0011" + "0" * 20, "0193c0de0013" + "0" * 20
    assert beside(second, "newer").startswith("/ui/rollouts/0193c0de0012")
    assert beside(second, "older", "?agent=codex").startswith("/ui/rollouts/0193c0de0010")
    first = "0193c0de0010" + "0" * 20
    assert beside(first, "older", "?agent=codex") == f"/ui/rollouts/{CODING}?agent=codex"
    assert beside(last, "newer", "?agent=codex") == "/ui/rollouts?agent=codex"


def test_every_stage_of_time_has_its_colour() -> None:
    styles = (STATIC_FOLDER / "ui.css").read_text()
    assert not [stage for stage in STAGES if f".s-{stage} {{" not in styles]


def given(value: float | None, **more: Any) -> Reward:
    return Reward(rollout_id=CODING, value=value, **more)


def reward_rows(page: str) -> list[str]:
    """Of the table of rewards: value, name and status of each, as a reader sees them."""
    rows = re.findall(r'<tr class="(?:counts|revised|late|part)">(.*?)</tr>', page, re.S)
    cells = [list(map(text_of, re.findall(r"<t[dh].*?</t[dh]>", row, re.S))) for row in rows]
    return [f"{cell[0]} {cell[1]}: {cell[-1]}".rstrip() for cell in cells]


@pytest.mark.parametrize(
    ("rewards", "rows"),
    [
        (
            [given(0.25), given(0.5, name="format")],
            ["0.25 reward: counts", "0.5 format:"],
        ),
        ([given(0.25), given(None)], ["0.25 reward: revised by a later one", "taken back reward:"]),
        ([given(0.25, turn=70)], ["0.25 reward: for no turn: not used"]),
        (
            [given(0.25), given(0.5, source=COMPOSED_SOURCE), given(0.75, source="judge")],
            [
                "0.25 reward: revised by a later one",
                "0.5 reward: counts",
                "0.75 reward: a part of the composed one",
            ],
        ),
    ],
)
def test_the_rewards_that_count_are_said_to(
    store: Store, browse: Browse, rewards: list[Reward], rows: list[str]
) -> None:
    store.append([*(each for each in coding_agent() if not isinstance(each, Reward)), *rewards])
    page = browse().get(f"/ui/rollouts/{CODING}").text
    assert reward_rows(page) == rows
    if rewards[0].turn is not None:
        assert "turn 70, which is not there" in text_of(page)


def test_a_reward_that_came_when_training_had_the_others_is_late(
    store: Store, browse: Browse
) -> None:
    fill(store, tasks=1, size=1)
    ledger = Ledger(store)
    store.append([Reward(rollout_id="t0.0", value=0.25)])
    lease(ledger, groups=1, size=1)
    store.append([Reward(rollout_id="t0.0", value=0.5)])
    rows = reward_rows(browse().get("/ui/rollouts/t0.0").text)
    assert rows[-2:] == [
        "0.25 reward: training took this one",
        "0.5 reward: came while it was being trained: not used",
    ]


def test_of_very_many_rewards_the_newest_are_shown(store: Store, browse: Browse) -> None:
    facts = [each for each in coding_agent() if not isinstance(each, Reward)]
    rewards = [given(n / 1_000, created_at=1e9 + n) for n in range(250)]
    store.append([*facts, *rewards, given(1.0, turn=0)])
    page = browse().get(f"/ui/rollouts/{CODING}").text
    rows = reward_rows(page)
    assert len(rows) == 200
    assert rows[-1] == "0.249 reward: counts"
    said = text_of(page)
    assert "50 earlier rewards not shown here." in said
    assert "1 reward for turns, with them." in said


def test_tokens_have_their_probability_version_and_disposition(
    store: Store, browse: Browse
) -> None:
    store.append(coding_agent())
    client = browse()
    page = client.get(f"/ui/rollouts/{CODING}/turns/1/tokens").text
    with store.reading() as connection:
        tokens = turn_tokens(connection, f"{CODING}.1")
    assert tokens is not None
    assert page.count('<span class="t ') == len(tokens.sampled)
    assert 'class="t b0 k-waiting a-none v0"' in page
    assert "log-probability -0.100 · probability 90.48% · version 3" in page
    part = client.get(f"/ui/rollouts/{CODING}/turns/1/tokens?part=1&by=version").text
    assert part.lstrip().startswith('<div class="tokens by-version"')
    wrong = client.get(f"/ui/rollouts/{CODING}/turns/1/tokens?by=luck")
    assert wrong.status_code == 400


def test_trained_tokens_have_their_advantage(store: Store, browse: Browse) -> None:
    trained_samples(store)
    client = browse()
    below = client.get(f"/ui/rollouts/{CODING}/turns/0/tokens?by=advantage").text
    assert below.count("k-trained a3") == below.count('<span class="t ')
    assert "trained in step 12, advantage -1.25" in text_of(below)
    assert "a-zero" in client.get(f"/ui/rollouts/{CODING}/turns/1/tokens?by=advantage").text
    unknown = client.get(f"/ui/rollouts/{CODING}/turns/2/tokens?by=advantage").text
    assert "a-none" in unknown
    assert "not known: this turn has none" in text_of(unknown)


@pytest.mark.parametrize(
    ("advantage", "colour"),
    [(None, "a-none"), (float("nan"), "a-none"), (0.0, "a-zero"), (1e-12, "a-zero"),
     (1.0, "a0"), (0.2, "a1"), (-0.2, "a2"), (-1.0, "a2"), (-1.01, "a3"), (-1e30, "a3")],
)  # fmt: skip
def test_advantages_have_colours(advantage: float | None, colour: str) -> None:
    assert credit_class(advantage) == colour


def test_a_long_rollout_opens_by_a_window_of_its_turns(store: Store, browse: Browse) -> None:
    turns = 130
    add_long_rollout(store, turns)
    client = browse()
    first = client.get(f"/ui/rollouts/{LONG}").text
    assert re.findall(r'id="turn-(\d+)"', first) == [str(n) for n in range(WINDOW)]
    assert "Later turns" in first
    # A link to a turn opens the window that has it.
    last = client.get(f"/ui/rollouts/{LONG}?turn=125").text
    assert re.findall(r'id="turn-(\d+)"', last) == [str(n) for n in range(120, turns)]
    assert "Earlier turns" in last
    assert "I read file 129." in last
    assert "The file 119 has 119 lines." in last
    assert "240 messages as in turn 119" in text_of(last)


def test_a_page_has_room_for_so_much_and_counts_the_rest(
    store: Store, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a word " * 1_000
    many: list[Json] = [{"role": "user", "content": f"message {n} {text}"} for n in range(200)]
    arguments = json.dumps({f"name{n}": text for n in range(30)})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    few: list[Json] = [{"role": "user", "content": "the last question"}]
    store.append(
        [
            large_turn(0, many, {"content": "reply 0"}),
            large_turn(1, few, {"content": "reply 1", "tool_calls": [call] * 50}),
            large_turn(2, few, {"content": "reply 2"}),
        ]
    )
    view = partial(rollout_page.rollout_view, characters=600_000)
    monkeypatch.setattr(rollout_page, "rollout_view", view)
    page = browse().get("/ui/rollouts/large").text
    assert len(page) < 1_200_000
    said = text_of(page)
    assert "message 0 a word" in said
    assert re.search(r"\d+ messages not shown here", said)
    assert re.search(r"\d+ more arguments not shown here", said)
    assert re.search(r"\d+ more calls not shown here", said)
    # What is large leaves room for what comes behind it.
    for last in ("reply 0", "reply 1", "reply 2", "the last question"):
        assert last in said


def test_of_very_many_messages_the_first_and_the_last_are_shown(
    store: Store, browse: Browse
) -> None:
    many: list[Json] = [{"role": "user", "content": f"<{n}>"} for n in range(1_000)]
    store.append([large_turn(0, many, {"content": "reply"})])
    said = html.unescape(browse().get("/ui/rollouts/large").text)
    shown = [int(n) for n in re.findall(r'<div class="text"><(\d+)></div>', said)]
    assert shown == [*range(FIRST_AND_LAST), *range(1_000 - FIRST_AND_LAST, 1_000)]
    assert "800 messages not shown here" in said


@pytest.mark.parametrize(("length", "whole"), [(10, False), (2_000, True), (100_000, True)])
def test_long_texts_are_cut_and_say_so(length: int, whole: bool) -> None:
    shown = shown_text("x" * length, 1_000)
    assert bool(shown.whole) == whole
    assert len(shown.whole or shown.head) + shown.left == length


def test_a_part_of_a_turns_tokens_says_so(store: Store, browse: Browse) -> None:
    question: list[Json] = [{"role": "user", "content": "go"}]
    store.append([large_turn(0, question, {"content": "reply"}, sampled=PAGE + 10)])
    client = browse()
    path = "/ui/rollouts/large/turns/0/tokens"
    for query in ("", "?part=1"):
        page = client.get(path + query).text
        assert page.count('<span class="t ') == PAGE
        assert "The first 2,000 of 2,010 tokens." in text_of(page)
    last = client.get(f"{path}?from={PAGE}").text
    assert last.count('<span class="t ') == 10
    assert "Tokens 2,000 to 2,009 of 2,010." in text_of(last)
