"""The benchmark of the store: what it writes is what it says, and every part of it runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from bench.store.batch import GROUP, batch
from bench.store.growth import growth
from bench.store.places import SQLite
from bench.store.plans import shortened
from bench.store.rollouts import BATCH, LONG, SHORT, SMALL, Rollout, Shape, rollout
from bench.store.sizes import size
from bench.store.traffic import Cell, Rate, traffic

TINY = Shape("tiny", 40, 8, 12, 3)


@pytest.fixture
def place(tmp_path: Path) -> SQLite:
    return SQLite(tmp_path)


def unique_tokens(made: Rollout) -> int:
    """Counted by what each turn's parent has."""
    contexts = {None: 0}
    total = 0
    for turn in made.turns:
        known = contexts[turn.parent_id]
        context = len(turn.prompt_token_ids) + len(turn.completion_token_ids)
        total += context - known
        contexts[turn.turn_id] = context
    return total


@pytest.mark.parametrize("shape", [SHORT, SMALL, TINY, BATCH], ids=lambda shape: shape.name)
def test_a_rollout_has_about_as_many_unique_tokens_as_its_shape_says(shape: Shape) -> None:
    made = rollout(shape, 1)
    assert len(made.turns) == shape.turns
    # Pieces that meet may merge, so that a text has a few tokens fewer.
    assert unique_tokens(made) == pytest.approx(shape.unique_tokens, rel=0.05)
    assert len(made.turns[0].prompt_token_ids) == shape.prompt


def test_later_turns_continue_tokens_and_messages_of_earlier_ones() -> None:
    for before, after in pairwise(rollout(TINY, 2).turns):
        context = before.prompt_token_ids + before.completion_token_ids
        assert after.parent_id == before.turn_id
        assert after.prompt_token_ids[: len(context)] == context
        assert before.request is not None
        assert after.request is not None
        messages = before.request["messages"]
        assert after.request["messages"][: len(messages)] == messages
        assert before.response is not None
        assert after.request["messages"][len(messages)] == {
            "role": "assistant",
            "content": before.response["choices"][0]["message"]["content"],
        }


def test_the_issues_shapes_are_measured() -> None:
    assert (SHORT.prompt, SHORT.sampled) == (200, 64)
    assert (LONG.prompt, LONG.sampled, LONG.turns) == (16_384, 512, 20)
    assert BATCH.turns == 20
    last = rollout(BATCH, 0).turns[-1]
    assert len(last.prompt_token_ids) + len(last.completion_token_ids) == pytest.approx(
        8_000, rel=0.02
    )


def test_without_texts_there_are_tokens_only() -> None:
    made = rollout(TINY, 0, texts=False)
    assert all(turn.request is None and turn.response is None for turn in made.turns)
    assert all(turn.prompt_token_ids for turn in made.turns)


def test_every_turn_is_written_and_read_by_as_many_threads(place: SQLite) -> None:
    found = traffic(place, Cell(TINY, 4, 2, 1))
    assert found.place == "SQLite"
    for rate in (found.written, found.read, found.lean):
        assert rate.turns_per_s > 0
        assert 0 < rate.p50_ms <= rate.p95_ms


def test_rates_are_the_medians_of_rounds() -> None:
    rounds = [Rate(1, 20, 300, 4), Rate(2, 10, 100, 5), Rate(9, 30, 200, 3)]
    assert Rate.median(rounds) == Rate(2, 20, 200, 4)


def test_sizes_count_tokens_without_their_texts(place: SQLite) -> None:
    found = size(place, SHORT, 6)
    assert (found.turns, found.tokens) == (6 * 8, 6 * 8 * 264)
    assert 1 < found.per_token < 10
    assert found.bytes_with_text > found.bytes_without_text


def test_a_batch_is_leased_whole_each_time(place: SQLite) -> None:
    found = batch(place, groups=2, times=2)
    assert (found.rollouts, found.turns) == (2 * GROUP, 2 * GROUP * 20)
    assert found.seconds > 0


def test_growth_times_every_operation_at_every_size_and_tells_plans(place: SQLite) -> None:
    said: list[str] = []
    found = growth(place, (800, 1_600), said.append)
    assert said == ["SQLite: 800 turns stored", "SQLite: 1,600 turns stored"]
    assert all(min(found.medians(operation)) > 0 for operation in found.rounds)
    assert all(len(each) == 2 for rounds in found.rounds.values() for each in rounds)
    assert found.bytes[0] < found.bytes[1]
    by_operation = {plan.operation for plan in found.plans}
    assert "find a turn by its id" in by_operation
    assert all(plan.lines for plan in found.plans)


def test_statements_are_shortened_to_what_tells_them_apart() -> None:
    many = "SELECT t.a, t.b \nFROM t \nWHERE t.id IN (?, ?, ?) AND t.x = ?"
    assert shortened(many) == "SELECT … FROM t WHERE t.id IN (?, …) AND t.x = ?"
    named = (
        "SELECT (SELECT b FROM u LIMIT 1) FROM t WHERE x = %(x)s::BIGINT AND id IN "
        '(%(i_1)s::VARCHAR COLLATE "C", %(i_2)s::VARCHAR COLLATE "C") LIMIT %(p)s::INTEGER'
    )
    assert shortened(named) == "SELECT … FROM t WHERE x = ? AND id IN (?, …) LIMIT ?"
    assert len(shortened("UPDATE t SET " + "a = 1, " * 1000)) <= 300
