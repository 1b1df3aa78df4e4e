"""Conversations without a name that go on after a pause: in their rollout, or, where training has
taken that one, in another with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engines.byte_tokenizer import save_byte_tokenizer
from support.engines.mock_engine import END, MODEL, Answer, MockEngine, render
from support.proxy.proxy_with_engine import ServeProxy
from support.store.ledger_fixtures import FakeClock, commit, lease
from support.store.ledger_fixtures import fake_clock as fake_clock
from tracegrad.events import Reward, Turn
from tracegrad.proxy.prompt_reuse.tree_cache import CachedTurn, _packed, _unpacked, cached_turn
from tracegrad.store import Ledger, Store

Json = dict[str, Any]
CHAT = "/v1/chat/completions"
IDLE_S = 60.0
TRACED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@dataclass
class Talk:
    """A client that sends replies back without the white space around them, as many do."""

    http: httpx.Client
    engine: MockEngine
    store: Store
    clock: FakeClock
    said: list[Json] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)  # of the answers

    def ask(self, text: str, reply: str, *, stream: bool = False) -> None:
        self.engine.replies.append(Answer(reply))
        self.said.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": self.said, "stream": stream}
        answer = self.http.post(CHAT, json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        first = answer.text.split('"id":"', 1)[1]
        self.ids.append(first[: first.index('"')])
        self.said.append({"role": "assistant", "content": reply.strip()})

    def close(self) -> list[str]:
        # Turns are dated by the real clock, which may have gone on for long on a busy machine.
        self.clock.advance(max(0.0, time.time() - self.clock.now) + IDLE_S + 1)
        return Ledger(self.store).close_idle(IDLE_S)

    def take(self) -> str:
        """What is closed and rewarded is leased."""
        [name] = self.close()
        self.store.append([Reward(rollout_id=name, value=1.0)])
        groups = lease(Ledger(self.store), size=1)
        assert [rollout.rollout_id for group in groups for rollout in group.rollouts] == [name]
        return name

    def rollouts(self) -> list[tuple[str | None, list[Turn]]]:
        """Which one each continues, and its turns; the oldest first."""
        rows = self.store.rollouts(limit=None)[::-1]
        return [(row.continues, self.store.rollout_turns(row.rollout_id)) for row in rows]


@pytest.fixture
def talk(
    serve_proxy: ServeProxy,
    engine: MockEngine,
    store: Store,
    fake_clock: FakeClock,
    tmp_path: Path,
) -> Iterator[Talk]:
    (tmp_path / "model").mkdir()
    folder = save_byte_tokenizer(tmp_path / "model")
    engine.takes_ids = True
    with serve_proxy(tokenizer=folder) as http:
        yield Talk(http, engine, store, fake_clock)


def sampled_after(turn: Turn, asked: str) -> list[int]:
    """The tokens of what the turn says, and of the next question."""
    return [
        *turn.prompt_token_ids,
        *turn.completion_token_ids,
        *render([{"role": "user", "content": asked}]),
    ]


def test_a_call_before_training_goes_on_in_its_rollout(talk: Talk) -> None:
    talk.ask("go", "a ")
    [name] = talk.close()
    assert talk.store.rollout(name).summary.state == "no_reward"
    talk.ask("on", "b ")
    assert talk.store.rollout(name).summary.state == "open"
    [(continues, [first, second])] = talk.rollouts()
    assert continues is None
    assert (second.parent_id, second.fork_reason) == (first.turn_id, None)
    assert talk.close() == [name]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_after_the_lease_goes_on_elsewhere_with_the_same_tokens(
    talk: Talk, stream: bool
) -> None:
    talk.ask("go", " a ", stream=stream)
    talk.ask("on", "b ", stream=stream)
    taken = talk.take()
    for text in ("still there?", "and now?", "bye"):
        talk.ask(text, f"{text} ", stream=stream)
    (before, old), (continues, new) = talk.rollouts()
    assert (before, continues) == (None, taken)
    assert len(old) == 2
    assert [turn.fork_reason for turn in new] == ["rollout_taken", None, None]
    assert [turn.parent_id for turn in new] == [None, *(turn.turn_id for turn in new[:2])]
    # What was sampled is there as it was sampled, which the client's messages do not say.
    path = [*old, *new]
    for earlier, turn, asked in zip(path[:-1], path[1:], talk.said[2::2], strict=True):
        assert turn.prompt_token_ids.tolist() == sampled_after(earlier, asked["content"])
    assert [*b" a ", END] == old[0].completion_token_ids.tolist()


def test_its_feedback_finds_the_new_rollout(talk: Talk) -> None:
    talk.ask("go", "a")
    taken = talk.take()
    talk.ask("on", "b")
    before, after = (
        talk.http.post("/api/feedback", json={"response_id": name, "thumbs": "down"}).json()
        for name in talk.ids
    )
    assert before["rollout_id"] == taken
    assert before["after_training"]
    assert after["rollout_id"] != taken
    assert "after_training" not in after
    assert talk.store.rollout(after["rollout_id"]).summary.reward == 0.0
    talk.store.rollout(taken)


def test_every_branch_off_a_taken_rollout_begins_one(talk: Talk) -> None:
    talk.ask("go", "a")
    talk.ask("on", "b")
    taken, whole = talk.take(), talk.said[:]
    talk.ask("this way", "c")
    talk.said = whole[:2]
    talk.ask("that way", "d")
    assert [continues for continues, _ in talk.rollouts()] == [None, taken, taken]


def test_of_several_choices_all_begin_one_rollout(talk: Talk) -> None:
    talk.ask("go", "a")
    taken = talk.take()
    talk.engine.replies += [Answer("b"), Answer("c")]
    messages = [*talk.said, {"role": "user", "content": "on"}]
    answer = talk.http.post(CHAT, json={"model": MODEL, "messages": messages, "n": 2})
    assert answer.status_code == 200
    _, (continues, turns) = talk.rollouts()
    assert (continues, len(turns)) == (taken, 2)


def test_a_call_that_names_its_rollout_stays_there(talk: Talk) -> None:
    talk.ask("go", "a")
    taken = talk.take()
    talk.headers = {"x-tracegrad-rollout": taken}
    talk.ask("on", "b")
    [(_, [first, second])] = talk.rollouts()
    assert second.parent_id == first.turn_id
    groups = lease(Ledger(talk.store), size=1)
    assert groups == []
    counts = talk.store.turn_counts()
    assert counts.pending == {"leased": 2}


def test_a_call_that_is_known_by_its_trace_goes_elsewhere_too(talk: Talk) -> None:
    talk.headers = TRACED
    talk.ask("go", "a")
    taken = talk.take()
    talk.ask("on", "b")
    talk.ask("and on", "c")
    assert [(known, len(turns)) for known, turns in talk.rollouts()] == [(None, 1), (taken, 2)]


def test_a_response_that_names_the_one_before_goes_elsewhere_too(talk: Talk) -> None:
    def respond(text: str, reply: str, previous: str | None) -> str:
        talk.engine.replies.append(Answer(reply))
        body = {"model": MODEL, "input": text, "previous_response_id": previous}
        answer = talk.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    last = respond("go", "a ", None)
    taken = talk.take()
    last = respond("on", "b ", last)
    respond("and on", "c", last)
    (_, [first]), (continues, [second, third]) = talk.rollouts()
    assert continues == taken
    assert second.prompt_token_ids.tolist() == sampled_after(first, "on")
    assert third.prompt_token_ids.tolist() == sampled_after(second, "and on")


def test_what_was_trained_and_what_goes_on_are_trained_once_each(talk: Talk) -> None:
    talk.ask("go", "a")
    [name] = talk.close()
    talk.store.append([Reward(rollout_id=name, value=1.0)])
    ledger = Ledger(talk.store)
    commit(ledger, lease(ledger, size=1))
    talk.ask("on", "b")
    [name] = talk.close()
    talk.store.append([Reward(rollout_id=name, value=0.0)])
    commit(ledger, lease(ledger, size=1), step=2)
    counts = talk.store.turn_counts()
    assert (counts.captured, counts.trained) == (2, 2)


@pytest.mark.parametrize("before", [None, ("rollout", "turn")])
def test_other_workers_know_what_it_continues(
    before: tuple[str, str] | None, make_recorded: Callable[[], CachedTurn]
) -> None:
    told = make_recorded()._replace(before=before)
    assert _unpacked(*_packed(told)) == told


@pytest.fixture
def make_recorded(talk: Talk) -> Callable[[], CachedTurn]:
    def make() -> CachedTurn:
        talk.ask("go", "a")
        [(_, [turn])] = talk.rollouts()
        return cached_turn(turn, None)

    return make
