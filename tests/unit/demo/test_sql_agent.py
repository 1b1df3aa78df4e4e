"""`make sql-agent`: questions, the database that a model may ask anything, the agent's graph."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from examples.shop import model
from examples.shop.tasks import pairs
from examples.sql_agent import agent, database, tasks, warm_start
from jinja2 import Environment
from langchain_core.messages import AIMessage, AnyMessage


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return database.create(tmp_path_factory.mktemp("sql") / "shop.db")


@pytest.fixture(scope="module")
def opened(path: Path) -> Any:
    opened = database.Database(path)
    yield opened
    opened.close()


class Model:
    """Says what it is given, and keeps what it was asked."""

    def __init__(self, replies: list[str]) -> None:
        self.replies = list(replies)
        self.asked: list[list[AnyMessage]] = []
        self.temperatures: set[float] = set()

    async def ainvoke(self, messages: list[AnyMessage], temperature: float) -> AIMessage:
        self.asked.append(list(messages))
        self.temperatures.add(temperature)
        return AIMessage(self.replies.pop(0))


@pytest.fixture
def play(path: Path) -> Any:
    async def run(*replies: str) -> tuple[database.Rows | None, Model]:
        fake: Any = Model([*replies])
        rows = await agent.SqlAgent(path, author=fake).answer("How many lamps?", 0.5)
        return rows, fake

    return run


async def test_the_reviewer_may_be_another_one(path: Path) -> None:
    author, reviewer = Model(["SELECT 1", "SELECT 2"]), Model(["no", "yes"])
    team: Any = {"author": author, "reviewer": reviewer}
    assert await agent.SqlAgent(path, **team).answer("How many lamps?") == ((2,),)
    assert (author.replies, reviewer.replies) == ([], [])


# --- questions ------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["validation", "held_out"])
def test_an_exam_is_distinct_balanced_and_names_no_pair_of_another_split(split: Any) -> None:
    exam = tasks.exam(split)
    assert len({task.question for task in exam}) == len({task.task_id for task in exam}) == 120
    assert set(Counter(task.kind for task in exam).values()) == {40}
    assert exam == tasks.exam(split)
    named = {(task.item, city) for task in exam for city in (task.city, task.other) if city}
    assert named <= set(pairs(split))
    trained = list(islice(tasks.train_tasks(seed=1), 300))
    assert {(task.item, c) for task in trained for c in (task.city, task.other) if c} <= set(
        pairs("train")
    )


def test_an_exam_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="count: split 'held_out' has too few questions"):
        tasks.exam("held_out", 1000)


def test_the_right_query_and_only_it_is_rewarded(opened: Any) -> None:
    for task in [*tasks.exam("held_out"), *tasks.exam("validation")]:
        assert task.reward(opened.query(task.query)) == 1.0
        assert task.reward(opened.query(task.careless_query)) == 0.0
        assert task.reward(None) == task.reward(()) == 0.0


# --- database -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT unit FROM stock", "no such column: unit"),
        ("DELETE FROM stock", "not authorized"),
        ("DROP TABLE stock", "not authorized"),
        ("ATTACH '{folder}/made.db' AS made", "not authorized"),
        ("VACUUM INTO '{folder}/made.db'", "authorization denied"),
        ("PRAGMA query_only = 0", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT count(*) FROM stock a, stock b, stock c, stock d", "interrupted"),
        ("SELECT zeroblob(100000000)", "too big"),
        ("SELECT '\0'", "null character"),
        ("SELECT '\ud800'", "surrogates"),
        ("no SQL at all", "syntax error"),
    ],
)
def test_what_a_model_writes_can_only_read(
    path: Path, opened: Any, tmp_path: Path, sql: str, words: str
) -> None:
    before = path.read_bytes()
    with pytest.raises(database.QueryFailed) as failed:
        opened.query(sql.replace("{folder}", str(tmp_path)))
    assert words in failed.value.message
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_rows_without_end_are_cut(opened: Any) -> None:
    assert len(opened.query("SELECT units FROM stock")) == database.MAX_ROWS
    assert opened.query("") == ()


# --- agent ----------------------------------------------------------------------------------

RIGHT = "SELECT units FROM stock WHERE item = 'lamp' AND city = 'Oslo'"


async def test_a_query_that_is_found_right_is_executed(play: Any, opened: Any) -> None:
    rows, fake = await play(RIGHT, "yes")
    assert rows == opened.query(RIGHT)
    assert [len(asked) for asked in fake.asked] == [2, 4]
    assert fake.temperatures == {0.5}


async def test_a_query_that_is_found_wrong_is_rewritten(play: Any, opened: Any) -> None:
    rows, fake = await play("SELECT 1", "no", RIGHT, "yes")
    assert rows == opened.query(RIGHT)
    assert [message.text for message in fake.asked[2][-3:]] == ["Is it right?", "no", "Rewrite it."]


async def test_what_sqlite_says_is_read_by_the_model(play: Any, opened: Any) -> None:
    rows, fake = await play("SELECT unit FROM stock", "yes", RIGHT, "yes")
    assert rows == opened.query(RIGHT)
    assert fake.asked[2][-1].text == "no such column: unit. Rewrite it."


@pytest.mark.parametrize("said", ["no", "what?"])
async def test_the_last_query_is_executed_whatever_the_check_says(play: Any, said: str) -> None:
    rows, fake = await play("SELECT 1", said, "SELECT 2", said, "SELECT 3", said)
    assert rows == ((3,),)
    assert fake.replies == []


@pytest.mark.parametrize("said", ["no", "yes"])
async def test_it_ends_without_an_answer(play: Any, said: str) -> None:
    rows, fake = await play(*("SELECT x", said) * (1 + agent.MAX_REWRITES))
    assert rows is None
    assert fake.replies == []


# --- demonstrations -------------------------------------------------------------------------


async def test_demonstrations_are_what_the_agent_would_say(path: Path) -> None:
    """Word by word: what is learnt is the conversation that the agent leads."""
    rng, recipe = random.Random(3), warm_start.Recipe()
    template = Environment(autoescape=False).from_string(model.CHAT_TEMPLATE)
    rewritten = 0
    for _ in range(60):
        text = warm_start.demonstration(rng, recipe)
        fake: Any = Model(re.findall(r"<\|assistant\|>(.*?)<\|end\|>", text))
        question = re.findall(r"<\|user\|>(.*?)<\|end\|>", text)[0]
        said = len(fake.replies)
        await agent.SqlAgent(path, author=fake).answer(question)
        rewritten += said > 2
        last = fake.asked[-1]
        roles = {"system": "system", "human": "user", "ai": "assistant"}
        messages = [{"role": roles[m.type], "content": m.text} for m in last]
        assert fake.replies == []
        assert text.startswith(template.render(messages=messages, add_generation_prompt=True))
    assert 6 < rewritten < 30


def test_most_demonstrations_are_careless_and_all_are_about_the_train_split() -> None:
    rng, recipe = random.Random(0), warm_start.Recipe()
    careless = 0
    train = set(pairs("train"))
    for _ in range(600):
        text = warm_start.demonstration(rng, recipe)
        item = re.search(r"item = '(\w+)'", text)
        assert item is not None
        assert {(item[1], city) for city in re.findall(r"city = '(\w+)'", text)} <= train
        first = text.split(model.ASSISTANT)[1].split(model.END)[0]
        careless += "orders" in first or first.startswith(("SELECT price ", "SELECT units FROM st"))
    right_units = 600 * (1 - recipe.careless) / 3  # begin as the careless ones of `both` do
    assert (careless - right_units) / 600 == pytest.approx(recipe.careless, abs=0.07)
