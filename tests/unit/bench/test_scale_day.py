"""A tiny day through the real proxy and a SQLite store: every call is stored, at its virtual
time."""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench.scale.board import Board, Cell
from bench.scale.clock import virtual_time
from bench.scale.day import EPOCH, Outcome, Plan, simulate
from bench.scale.rig import Rig, rig, sqlite_file
from bench.scale.session import Session, Texts
from bench.scale.tokenizer import END, save_tokenizer
from bench.scale.workload import DAY_S, SMALL_MODEL, Length, Workload, rollouts_of
from tokenizers import Tokenizer

from tracegrad.chat.model import load_chat_format

# Twenty agents that begin about a rollout each within a minute.
TINY = Workload(
    agents=20,
    seconds=60,
    rollouts_a_day=DAY_S / 60,
    swing=0.0,
    turns=3.0,
    most_turns=4,
    programs=2,
    instructions=60,
    task=Length(20, 0.5, 40),
    observation=Length(20, 0.5, 40),
    completion=Length(12, 0.5, 30),
    tool_s=1.0,
    reward_delay_s=2.0,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocabulary=1_000)


@pytest.fixture(scope="module")
def texts(tokenizer: Path) -> Texts:
    return Texts(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))


def test_a_board_is_shared(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board")
    board[Cell.NOW] = EPOCH + 0.5
    board.add(Cell.COMMITS, 2)
    other = Board(tmp_path / "board")
    assert (other[Cell.NOW], other[Cell.COMMITS], other[Cell.TURNS]) == (EPOCH + 0.5, 2, 0)
    other.add(Cell.COMMITS, 1)
    assert board[Cell.COMMITS] == 3


def test_the_clock_is_virtual_only_within() -> None:
    before = time.time(), time.monotonic()
    with virtual_time(lambda: EPOCH + 0.25):
        assert time.time() == EPOCH + 0.25
        assert time.time_ns() == int((EPOCH + 0.25) * 1e9)
        assert time.monotonic() >= before[1], "is the real one"
    assert time.time() >= before[0]


def test_texts_have_as_many_tokens_as_they_say(tokenizer: Path, texts: Texts) -> None:
    chat = load_chat_format(tokenizer)
    text = texts.of(50, "a")
    assert texts.of(50, "a") == text != texts.of(50, "b")
    assert len(chat.tokenizer.encode(text)) == pytest.approx(50, abs=4)
    assert chat.tokenizer.added_token(chat.tokenizer.encode(END)[0]) == END
    assert texts.instructions(1, 60) == texts.instructions(1, 60) != texts.instructions(2, 60)


@pytest.mark.parametrize(
    ("every", "together", "tick_s"), [(1, True, 1), (7, True, 6), (400, True, 15), (400, False, 1)]
)
def test_a_step_of_the_clock_is_as_long_as_agents_are_few(
    every: int, together: bool, tick_s: int
) -> None:
    plan = Plan(TINY, SMALL_MODEL, "d", every=every, together=together)
    assert plan.tick_s == tick_s


@contextmanager
def running(folder: Path, tokenizer: Path) -> Iterator[Rig]:
    with rig(folder, sqlite_file(folder / "store.db"), tokenizer, now=EPOCH) as processes:
        yield processes


def rows(folder: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(folder / "store.db")) as connection:
        return connection.execute(query).fetchall()


def test_every_call_of_a_day_is_stored_at_its_virtual_time(
    tmp_path: Path, tokenizer: Path, texts: Texts
) -> None:
    called: list[tuple[Session, float]] = []
    plan = Plan(TINY, SMALL_MODEL, "tiny")
    with running(tmp_path, tokenizer) as processes:
        outcome = asyncio.run(
            simulate(plan, processes, texts, lambda session, at: called.append((session, at)))
        )
    assert not outcome.failed
    check_calls(tmp_path, outcome, called)
    check_rollouts(tmp_path, called)
    check_busy_times(outcome)


def check_calls(folder: Path, outcome: Outcome, called: list[tuple[Session, float]]) -> None:
    times = [at for _, at in called]
    assert times == sorted(times), "the clock never goes back"
    assert all(EPOCH <= at < EPOCH + 60 for at in times)
    assert times == sorted(expected_times())
    whole = outcome.whole
    assert whole.done.calls == whole.used.turns == len(called) > 20
    stored = Counter(at for (at,) in rows(folder, "SELECT created_at FROM turns"))
    assert stored == Counter(times)
    by_name = rows(folder, "SELECT rollout_id, created_at FROM turns")
    for name in {session.name for session, _ in called} - {None}:
        at = [moment for session, moment in called if session.name == name]
        assert sorted(moment for found, moment in by_name if found == name) == at


def expected_times() -> list[float]:
    """When the calls of the tiny day are made, each rollout by itself: in the second in which the
    engine and the tool are through, no two of a rollout in one."""
    times: list[float] = []
    for rollout in (each for agent in range(20) for each in rollouts_of(TINY, agent, 0)):
        due, new = rollout.begins, TINY.instructions
        for turn in rollout.turns:
            if due >= 60:
                break
            second = math.floor(due)
            times.append(EPOCH + second)
            latency = SMALL_MODEL.latency_s(new + turn.said, turn.completion)
            due, new = max(second + latency + turn.tool_s, second + 1), 0
    return times


def check_rollouts(folder: Path, called: list[tuple[Session, float]]) -> None:
    """A conversation that nobody names is one rollout all the same."""
    sessions = {id(session): session for session, _ in called}.values()
    assert len(rows(folder, "SELECT 1 FROM rollouts")) == len(sessions)
    assert {session.rollout.named for session in sessions} == {True, False}
    roots = rows(folder, "SELECT 1 FROM turns WHERE parent_id IS NULL")
    assert len(roots) == len(sessions), "later turns continue the first's tokens"
    begun = [each for agent in range(20) for each in rollouts_of(TINY, agent, 0)]
    assert len(begun) == len(sessions)


def check_busy_times(outcome: Outcome) -> None:
    done, used = outcome.whole.done, outcome.whole.used
    assert 0 < used.writer_s <= done.wall_s
    assert 0 < used.writer_cpu_s <= used.writer_s * 1.1, "clocks of different grain"
    cores = os.cpu_count() or 1
    assert 0 < used.proxy_cpu_s <= cores * done.wall_s
    assert 0 < used.commits <= used.events
    assert used.events >= done.calls + done.posts
    assert done.prompt_tokens > done.new_tokens > done.sampled_tokens > 0
    assert used.store_bytes > 0
    assert done.agent_bytes > 0
    assert used.engine_bytes > 0


def test_calls_one_after_another_have_commits_of_their_own(
    tmp_path: Path, tokenizer: Path, texts: Texts
) -> None:
    plan = Plan(TINY, SMALL_MODEL, "alone", every=4, together=False)
    with running(tmp_path, tokenizer) as processes:
        outcome = asyncio.run(simulate(plan, processes, texts))
    whole = outcome.whole
    assert not outcome.failed
    assert whole.used.commits == whole.done.calls + whole.done.posts > 0
