"""A rollout's page: conversation, rewards, forks, time, tokens; windows of long ones."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from bench.ui.long_rollout import LONG, add_long_rollout
from starlette.testclient import TestClient

from support.cli.sample_rollouts import coding_agent, four_alike, samples_of_one_prompt, spans_alone
from tracegrad.events import Reward
from tracegrad.inspect.rollout_time import STAGES
from tracegrad.store import Store
from tracegrad.store.read.rollout_outline import rollout_outline, turn_tokens, with_texts
from tracegrad.ui.environment import STATIC_FOLDER
from tracegrad.ui.pages.rollout import WINDOW, shown_text

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
    assert "20" in said
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


def test_late_rewards_and_rewards_for_no_turn_are_said(store: Store, browse: Browse) -> None:
    store.append([*coding_agent(), Reward(rollout_id=CODING, value=1.0, turn=70)])
    assert "turn 70, which is not there" in text_of(browse().get(f"/ui/rollouts/{CODING}").text)


def test_tokens_have_their_probability_version_and_fate(store: Store, browse: Browse) -> None:
    store.append(coding_agent())
    client = browse()
    page = client.get(f"/ui/rollouts/{CODING}/turns/1/tokens").text
    with store.reading() as connection:
        tokens = turn_tokens(connection, f"{CODING}.1")
    assert tokens is not None
    assert page.count('<span class="t ') == len(tokens.sampled)
    assert 'class="t b0 k-waiting v0"' in page
    assert "log-probability -0.100 · probability 90.48% · version 3" in page
    part = client.get(f"/ui/rollouts/{CODING}/turns/1/tokens?part=1&by=version").text
    assert part.lstrip().startswith('<div class="tokens by-version"')
    wrong = client.get(f"/ui/rollouts/{CODING}/turns/1/tokens?by=luck")
    assert wrong.status_code == 400


def test_outlines_have_the_texts_and_tokens_of_the_whole(store: Store) -> None:
    store.append([*coding_agent(), *samples_of_one_prompt()])
    for rollout in (CODING, "0193c0de0002" + "0" * 20):
        whole = store.rollout_turns(rollout)
        with store.reading() as connection:
            outline = rollout_outline(connection, rollout)
            some = with_texts(connection, outline, {len(whole) - 1, 1})
            for number, turn in enumerate(whole):
                size = outline.sizes[number]
                assert size.prompt == len(turn.prompt_token_ids)
                assert size.versions == turn.policy_versions
                tokens = turn_tokens(connection, turn.turn_id)
                assert tokens is not None
                assert tokens.sampled == turn.completion_token_ids
                assert tokens.logprobs == turn.completion_logprobs
        assert {number: turn.request for number, turn in some.items()} == {
            number: whole[number].request for number in (1, len(whole) - 1)
        }


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


@pytest.mark.parametrize(("length", "whole"), [(10, False), (2_000, True), (100_000, True)])
def test_long_texts_are_cut_and_say_so(length: int, whole: bool) -> None:
    shown = shown_text("x" * length, 1_000)
    assert bool(shown.whole) == whole
    assert len(shown.whole or shown.head) + shown.left == length
