"""`tracegrad rollouts ls`."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from sqlalchemy import update

from support.cli.run_rollouts import in_order, printed, printed_json, run
from support.cli.sample_rollouts import every_sample
from support.store.events import make_turn, rollout_events
from tracegrad.cli.render.rollout_list import short_id_width
from tracegrad.events import Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import Ledger, StepRecord, Store
from tracegrad.store.models import Rollouts
from tracegrad.store.read.task_titles import MAX_TITLE, input_text
from tracegrad.task_ids import task_and_input


def ids(url: str, *wanted: str) -> list[str]:
    return [row["rollout_id"] for row in printed_json(url, "ls", *wanted)]


@pytest.fixture
def standing(store: Store) -> Store:
    """A rollout in each state, named after it."""
    for at, (name, outcome, reward) in enumerate(
        [
            ("open", None, None),
            ("no_reward", Outcome.COMPLETED, None),
            ("waiting", Outcome.BUDGET, 0.5),
            ("leased", Outcome.COMPLETED, 1.0),
            ("consumed", Outcome.COMPLETED, 0.25),
            ("env_error", Outcome.ENV_ERROR, None),
            ("no_task", Outcome.COMPLETED, 0.125),
            ("named_reward", Outcome.COMPLETED, None),
            ("skipped", Outcome.COMPLETED, 0.0625),
            ("held_out", Outcome.COMPLETED, 0.03125),
        ]
    ):
        task = None if name == "no_task" else name
        store.append(
            rollout_events(
                name,
                task=task,
                reward=reward,
                outcome=outcome,
                at=1000.0 + at,
                turns=at,
                held_out=name == "held_out",
            )
        )
    store.append([Reward(rollout_id="named_reward", value=1.0, name="score")])
    ledger = Ledger(store)
    stale = {turn.turn_id: "stale" for turn in store.rollout_turns("skipped")}
    ledger.commit_skipped(stale, ["skipped"])
    trained = [turn.turn_id for turn in store.rollout_turns("consumed")]
    ledger.commit_step(
        StepRecord(step=1, version=1), trained=trained, skipped={}, rollouts=["consumed"]
    )
    store.append([RolloutStarted(rollout_id="leased-too", task_id="leased", opened_at=999.0)])
    with store.exclusive() as connection:
        connection.execute(
            update(Rollouts)
            .where(Rollouts.rollout_id == "leased")
            .values(leased_until=time.time() + 600, lease_id="l", lease_owner="me")
        )
    return store


def test_the_newest_come_first_and_fit(store: Store, url: str) -> None:
    for n in range(5):
        facts = rollout_events(
            f"{n:012x}{'0' * 20}",
            task="a-task-with-a-rather-long-name",
            at=n + 1,
            tags={"split": "held_out"},
            outcome=Outcome.INFRA_ERROR,
        )
        store.append(facts)
    for columns in (60, 80, 140):
        lines = printed(url, "ls", "--limit", "4", columns=columns).splitlines()
        assert [line.split()[0] for line in lines[1:5]] == [f"{n:012x}" for n in (4, 3, 2, 1)]
        assert all("infra_error" in line for line in lines[1:5])
        assert lines[5] == "the 4 newest; more with --limit"
    assert "split=held_out" in lines[1]
    assert "a-task-with-a-rather-long-name" in lines[1]


def test_a_pipe_gets_every_column_whole(store: Store, url: str) -> None:
    name = "a task with a name that no terminal has room for " * 4
    store.append(rollout_events("r", task=name, tags={"note": "x" * 200}))
    [_, line] = printed(url, "ls", columns=None).splitlines()
    assert name.strip() in line
    assert "note=" + "x" * 200 in line


def test_filters(store: Store, url: str) -> None:
    store.append(rollout_events("a", task="x", tags={"split": "train"}))
    store.append(rollout_events("b", task="y", outcome=None))
    assert sorted(ids(url)) == ["a", "b"]
    assert ids(url, "--task", "y") == ["b"]
    assert ids(url, "--tag", "split=train") == ["a"]
    assert ids(url, "--outcome", "open") == ["b"]
    assert ids(url, "--agent", "nobody") == []
    assert "no rollouts match" in printed(url, "ls", "--agent", "nobody")


@pytest.mark.parametrize(
    "state",
    [
        *("no_reward", "waiting", "leased", "env_error", "open", "no_task", "named_reward"),
        *("skipped", "held_out"),
    ],
)
def test_each_state_finds_those_that_stand_so(standing: Store, url: str, state: str) -> None:
    found = ids(url, "--state", state)
    assert [name for name in found if name != "leased-too"] == [state]
    shown = [line.split()[-1] for line in printed(url, "ls", "--state", state).splitlines()[1:]]
    assert shown == [state] * len(found), "the screen has the word that the option takes"


@pytest.mark.parametrize(
    "state",
    ["no_reward", "waiting", "leased", "env_error", "no_task", "named_reward", "held_out"],
)
def test_every_command_calls_a_state_the_same(standing: Store, url: str, state: str) -> None:
    [reason] = printed_json(url, "explain", state)["not_trained"]
    assert reason["reason"] == state
    [row] = printed_json(url, "ls", "--state", state)
    assert row["state"] == printed_json(url, "show", state)["state"] == state
    counted = [
        each["reason"] for each in printed_json(url, "explain", "--state", state)["not_trained"]
    ]
    assert counted == [state]
    assert standing.turn_counts().pending.get(state) == row["turns"]


def test_held_out_ones_are_told_by_every_command_also_when_they_are_consumed(
    standing: Store, url: str
) -> None:
    assert ids(url, "--eval") == ["held_out"]
    assert "held_out" not in ids(url, "--no-eval")
    Ledger(standing).lease(groups=9, group_size=2, owner="me", ttl_s=60)
    assert printed(url, "ls", "--eval").splitlines()[1].split()[-1] == "held_out"
    assert printed_json(url, "show", "held_out")["held_out"] is True
    shown = printed(url, "show", "held_out")
    assert "held out  for evaluation: never trained" in shown
    [reason] = printed_json(url, "explain", "held_out")["not_trained"]
    assert (reason["reason"], reason["final"]) == ("held_out", True)
    assert standing.turn_counts().skipped["held_out"] == 9


def test_those_that_training_is_done_with_were_trained_or_skipped(
    standing: Store, url: str
) -> None:
    assert ids(url, "--state", "consumed") == ["skipped", "consumed"]
    assert ids(url, "--state", "trained") == ["consumed"]


def test_sorted_by_reward_those_without_one_come_last(standing: Store, url: str) -> None:
    found = ids(url, "--sort", "reward")
    assert found[:6] == ["leased", "waiting", "consumed", "no_task", "skipped", "held_out"]
    # The rest has none, and is sorted by age.
    assert found[6:] == ["named_reward", "env_error", "no_reward", "open", "leased-too"]
    assert ids(url, "--sort", "reward", "--limit", "1") == ["leased"]


def test_sorted_by_turns_and_by_tokens(store: Store, url: str) -> None:
    store.append(rollout_events("many-turns", turns=4, at=1.0))
    store.append([make_turn("t", "many-tokens", sampled=range(50), created_at=2.0)])
    store.append([RolloutStarted(rollout_id="nothing", opened_at=3.0)])
    assert ids(url, "--sort", "turns") == ["many-turns", "many-tokens", "nothing"]
    assert ids(url, "--sort", "tokens") == ["many-tokens", "many-turns", "nothing"]
    text = printed(url, "ls", "--sort", "tokens", "--limit", "1")
    assert text.splitlines()[-1] == "the 1 first by tokens; more with --limit"


def test_by_task_compares_the_rollouts_of_a_task(store: Store, url: str) -> None:
    for n, reward in enumerate([0.0, 1.0, 1.0, 2.0]):
        store.append(rollout_events(f"a{n}", task="spread", reward=reward, at=10.0 + n))
    for n in range(3):
        store.append(rollout_events(f"b{n}", task="equal", reward=0.5, at=20.0 + n))
    store.append(
        [
            RolloutStarted(rollout_id="c", task_id="equal", opened_at=1.0),
            RolloutStarted(rollout_id="d", opened_at=30.0),
            RolloutFinished(rollout_id="d", outcome=Outcome.ABORTED),
        ]
    )
    found = {task["task_id"]: task for task in printed_json(url, "ls", "--by-task")}
    assert list(found) == [None, "equal", "spread"]
    assert found["spread"]["reward_mean"] == 1.0
    assert found["spread"]["reward_deviation"] == pytest.approx(0.5**0.5)
    assert (found["spread"]["reward_min"], found["spread"]["reward_max"]) == (0.0, 2.0)
    assert found["equal"]["outcomes"] == {"completed": 3, "open": 1}
    assert (found["equal"]["rollouts"], found["equal"]["rewarded"]) == (4, 3)
    assert found[None]["reward_mean"] is None
    by_reward = printed_json(url, "ls", "--by-task", "--sort", "reward")
    assert [task["task_id"] for task in by_reward] == ["spread", "equal", None]
    lines = [line.split() for line in printed(url, "ls", "--by-task", columns=100).splitlines()]
    assert lines[0] == ["task", "age", "rollouts", "reward", "from", "to", "outcomes"]
    assert [" ".join([line[0], *line[2:]]) for line in lines[1:]] == [
        "untitled 1 1 aborted",
        "equal 4 0.5 ± 0 0.5 0.5 3 completed, 1 open",
        "spread 4 1 ± 0.7071 0 2 4 completed",
    ]
    assert printed_json(url, "ls", "--by-task", "--task", "spread") == [found["spread"]]
    cut = printed(url, "ls", "--by-task", "--limit", "1").splitlines()
    assert cut[-1] == "1 of 3 tasks; more with --limit"


def test_what_agents_call_their_tasks_stays_in_its_cell(store: Store, url: str) -> None:
    store.append(
        [
            RolloutStarted(
                rollout_id="r", task_id="a\nb\x1b[2J\u202ec", agent="x\ty", tags={"k": "v\nw"}
            ),
            Reward(rollout_id="r", value=1.0),
        ]
    )
    lines = printed(url, "ls", columns=120).splitlines()
    assert len(lines) == 2
    assert "a b\ufffd[2J\ufffdc" in lines[1]
    assert "k=v w" in lines[1]
    assert len(printed(url, "ls", "--by-task").splitlines()) == 2


def test_a_table_of_real_rollouts(store: Store, url: str) -> None:
    store.append(every_sample())
    text = printed(url, "ls", columns=120)
    in_order("\n".join(" ".join(line.split()[2:]) for line in text.splitlines()), [
        "task outcome reward turns tokens training agent tags",
        "untitled open 1 0 open concierge",
        "multiply budget 1 6 72 waiting",
        "mend-the-cart completed 1 20 457 waiting codex split=train seed=7",
    ])  # fmt: skip


def test_an_empty_store_says_so(store: Store, url: str) -> None:
    assert printed(url, "ls") == "no rollouts yet\n"
    assert printed(url, "ls", "--by-task") == "no rollouts yet\n"
    assert printed(url, "ls", "--json") == "[]\n"
    assert printed(url, "ls", "--by-task", "--json") == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--outcome", "good"], "'good'; use open, completed"),
        (["--state", "good"], "'good'; use open, no_turns, no_reward, named_reward"),
        (["--tag", "good"], "'good'; write key=value"),
        (["--by-task", "--sort", "turns"], "tasks are sorted by newest or reward"),
    ],
)
def test_mistakes_name_the_option(url: str, arguments: list[str], line: str) -> None:
    result = run(url, "ls", *arguments, columns=200)
    assert result.exit_code == 2
    assert line in result.stderr
    assert f"Invalid value for {arguments[-2]}" in result.stderr
    assert result.stdout == ""


def test_short_ids_stay_distinct() -> None:
    assert short_id_width(["0" * 32]) == 12
    assert short_id_width(["0" * 13 + "a", "0" * 13 + "b"]) == 14
    assert short_id_width(["ab", "abc"]) == 3
    assert short_id_width([]) == 0


def asked(url: str, **changes: object) -> None:
    """Rollouts as `@trace` opens them: the task's id is a hash, the arguments are kept."""
    for n, question in enumerate(["Which river runs\nthrough Vienna?", "Sort 3 1 2"]):
        arguments = {"self": "<Agent>", "k": 3, "question": question} | changes
        task_id, plain = task_and_input(asked, arguments)
        opened, *rest = rollout_events(f"r{n}", task=task_id, reward=1.0, at=100.0 + n)
        assert isinstance(opened, RolloutStarted)
        with Store.open(url) as store:
            store.append([replace(opened, task=plain.value), *rest])


@pytest.mark.parametrize("by_task", [[], ["--by-task"]])
def test_tasks_that_nobody_named_are_shown_by_what_was_asked(by_task: list[str], url: str) -> None:
    with Store.open(url) as store:
        store.append(rollout_events("named", task="board-17", reward=0.0, at=200.0))
        store.append([RolloutStarted(rollout_id="r9", opened_at=90.0)])
    asked(url)
    for columns in (80, 100, 160, None):
        said = printed(url, "ls", *by_task, columns=columns)
        assert all(title in said for title in ("board-17", "Which river runs thro", "untitled"))
        assert "Sort 3 1 2 · k=3" in said
    task_id = task_and_input(asked, {"self": "<Agent>", "k": 3, "question": "Sort 3 1 2"})[0]
    assert task_id in said, "where there is room, for --task"
    assert "Sort 3 1 2" in printed(url, "ls", *by_task, "--task", task_id)
    rows = {row["task_id"]: row["asked"] for row in printed_json(url, "ls", *by_task)}
    assert rows[task_id] == "Sort 3 1 2 · k=3"
    assert rows["board-17"] is None


def test_a_long_input_is_cut_and_a_redacted_one_stays_so(url: str) -> None:
    asked(url, question="word " * 100_000, image=None)
    [row, _] = printed_json(url, "ls")
    assert len(row["asked"]) == MAX_TITLE
    assert row["asked"].endswith("…")
    assert max(map(len, printed(url, "ls", columns=None).splitlines())) < 2 * MAX_TITLE
    with Store.open(url) as store, store.exclusive() as connection:
        connection.execute(update(Rollouts).values(task=None))
    assert row["task_id"] in printed(url, "ls"), "what is left to call it by"


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (None, None),
        ("", None),
        ({}, None),
        ("What\n is it?", "What is it?"),
        ({"question": "What?"}, "What?"),
        ({"board": [1, 2], "goal": "win"}, "win · board=[1,2]"),
        ({"n": 3}, "3"),
        ({"self": "<A>"}, None),
        ([1, {"a": 2}], '[1,{"a":2}]'),
    ],
)
def test_the_beginning_of_an_input(task: object, text: str | None) -> None:
    assert input_text(task) == text


def alike(url: str, prefix: str, *questions: str) -> list[str]:
    """Rollouts under `@trace` whose inputs begin alike, three a task. The tasks' ids."""
    ids = []
    for number, question in enumerate(questions):
        task_id, plain = task_and_input(asked, {"question": prefix + question})
        ids.append(task_id)
        for n in range(3):
            opened, *rest = rollout_events(f"r{number}{n}", task=task_id, at=100.0 + n)
            assert isinstance(opened, RolloutStarted)
            with Store.open(url) as store:
                store.append([replace(opened, task=plain.value), *rest])
    return ids


CITIES = ("Which river runs through Vienna?", "Which river runs through Prague?", "And Rome?")


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("by_task", [[], ["--by-task"]])
@pytest.mark.parametrize("repeated", [1, 8, 40], ids=["a line", "beyond a title", "long"])
def test_titles_that_begin_alike_show_where_they_part(
    url: str, by_task: list[str], repeated: int
) -> None:
    ids = alike(url, "You answer with the name of a river and nothing else. " * repeated, *CITIES)
    for columns in (80, 120, None):
        head, *lines = printed(url, "ls", *by_task, columns=columns).splitlines()
        end = head.index("task id") if "task id" in head else head.index("outcome")
        titles = {line[head.index("task") : end].rstrip() for line in lines}
        assert len(titles) == len(ids), "each task has one of its own, the same in each row"
        assert all(title.startswith("You") for title in titles)
        assert sum("Vienna" in title or "Vi…" in title for title in titles) == 1
        if by_task or columns != 80:
            assert {line[end:].split()[0][:8] for line in lines} == {each[:8] for each in ids}
    for task_id in ids:
        found = printed_json(url, "ls", *by_task, "--task", task_id[:8])
        assert {row["task_id"] for row in found} == {task_id}


@pytest.mark.databases("sqlite")
def test_equal_titles_of_different_tasks_have_their_ids(url: str) -> None:
    """Two functions with one input: other tasks."""
    ids = []
    for n, function in enumerate([asked, alike]):
        task_id, plain = task_and_input(function, {"question": "Which river runs through Vienna?"})
        ids.append(task_id)
        opened, *rest = rollout_events(f"r{n}", task=task_id)
        assert isinstance(opened, RolloutStarted)
        with Store.open(url) as store:
            store.append([replace(opened, task=plain.value), *rest])
    for columns in (60, 80, 120):
        for by_task in ([], ["--by-task"]):
            text = printed(url, "ls", *by_task, columns=columns)
            assert all(task_id[:8] in text for task_id in ids), text
