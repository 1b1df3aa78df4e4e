"""`tracegrad rollouts ls | show`, run as a user runs it and read as a user reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store_facts import make_turn, whole_rollout
from typer.testing import CliRunner, Result

from tracegrad.cli.app import app
from tracegrad.cli.listing import short_id_width
from tracegrad.records import Outcome, RewardGiven, RolloutFinished, RolloutOpened, SpanEnded
from tracegrad.store import Ledger, StepRecord, Store

SYSTEM = {"role": "system", "content": "Answer with a number."}
USER = {"role": "user", "content": "How many red mugs? [bold]"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"item": "mug"}'},
}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "stock: 4\x1b[2J"}


def run(url: str, *arguments: str, columns: int = 80) -> Result:
    environment = {"TRACEGRAD_STORE": url, "COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner().invoke(app, ["rollouts", *arguments], env=environment)


def said(url: str, *arguments: str, columns: int = 80) -> str:
    result = run(url, *arguments, columns=columns)
    assert result.exit_code == 0, result.output
    assert all(
        len(line) <= columns for line in result.stdout.splitlines() if "--json" not in arguments
    )
    return result.stdout


@pytest.fixture
def story(store: Store) -> Store:
    """A rollout with a tool call, a fork, spans, rewards; trained but for its fork."""
    ask: dict[str, Any] = {"messages": [SYSTEM, USER]}
    called = {
        "choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}]
    }
    t0 = make_turn("t0", "abcdef123456", request=ask, response=called, finish_reason="tool_calls",
                   parent_span_id="a" * 16, version=3)  # fmt: skip
    echo = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    again = {"messages": [SYSTEM, USER, echo, TOOL]}
    answer = {"choices": [{"message": {"content": "There are 4.", "reasoning": "4 in stock"}}]}
    t1 = make_turn("t1", "abcdef123456", parent=t0, request=again, response=answer, version=4)
    edited = {"messages": [SYSTEM, {"role": "user", "content": "Shorter!"}]}
    t2 = make_turn("t2", "abcdef123456", request=edited, fork_reason="edited_history")
    rollout = "abcdef123456"
    trace = "0" * 32
    store.append(
        [
            RolloutOpened(rollout_id=rollout, task_id="mugs", agent="shop", opened_at=10.0,
                          tags={"split": "train"}, task={"question": "red mugs"}),
            t0, t1, t2,
            RewardGiven(rollout_id=rollout, value=0.0, created_at=11.0),
            RewardGiven(rollout_id=rollout, value=1.0, created_at=12.0, source="person"),
            RewardGiven(rollout_id=rollout, value=0.5, name="format", turn=-1),
            SpanEnded(trace_id=trace, span_id="b" * 16, rollout_id=rollout, name="solve",
                      start_ns=10**9, end_ns=5 * 10**9),
            SpanEnded(trace_id=trace, span_id="a" * 16, parent_span_id="b" * 16, name="look up",
                      rollout_id=rollout, start_ns=2 * 10**9, end_ns=3 * 10**9, status="error"),
            RolloutFinished(rollout_id=rollout, finished_at=13.0),
        ]
    )  # fmt: skip
    Ledger(store).commit_step(
        StepRecord(step=5, version=6),
        trained=["t0", "t1"],
        skipped={"t2": "fork"},
        rollouts=[rollout],
    )
    return store


def test_show_tells_the_whole_story(story: Store, url: str) -> None:
    lines = [" ".join(line.split()) for line in said(url, "show", "abc").splitlines()]
    story_so_far = iter(lines)
    for expected in [
        "rollout abcdef123456",
        "task mugs",
        'asked {"question":"red mugs"}',
        "agent shop",
        "tags split=train",
        "reward 0 from agent revised",
        "reward 1 from person",
        "reward 0.5 format for turn 2 from agent",
        "training 2 of 3 turns trained in step 5, 1 not: fork",
        "system Answer with a number.",
        "user How many red mugs? [bold]",
        'reply → lookup({"item": "mug"})',
        "… 3 messages as in turn 0",
        "tool stock: 4\ufffd[2J",
        "reply 4 in stock",
        "There are 4.",
        "… 1 message as in turn 1",
        "user Shorter!",
        "solve 4.0 s at +0 ms",
        "└── look up 1.0 s at +1.0 s error turn 0",
    ]:
        assert expected in story_so_far, f"{expected!r} is not there, or not in this order"
    text = " ".join(lines)
    assert "outcome completed in 3.0 s" in text
    assert "3 prompt + 2 tokens · version 3 · mean logprob -0.500 · tool_calls · trained" in text
    assert "turn 2 starts afresh fork: edited_history" in text
    assert "not trained: fork" in text


def test_show_prints_tokens_when_asked(story: Store, url: str) -> None:
    text = said(url, "show", "abc", "--tokens")
    assert "sampled" in text
    assert "4:-0.50 5:-0.50" in text
    assert "sampled" not in said(url, "show", "abc")


def test_show_shortens_long_messages_unless_told(store: Store, url: str) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 2000 + "END"}]}
    store.append([make_turn("t", "r", request=long)])
    assert "more characters)" in said(url, "show", "r")
    assert "END" not in said(url, "show", "r")
    assert "END" in said(url, "show", "r", "--full")


def test_show_prints_objects_for_scripts(story: Store, url: str) -> None:
    shown = json.loads(said(url, "show", "abc", "--json", "--tokens"))
    turn = shown["turns"][1]
    assert turn["parent_turn_id"] == "t0"
    assert turn["prompt_token_ids"] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert turn["completion_logprobs"] == [-0.5, -0.5]
    assert turn["policy_versions"] == [[4, 2]]
    assert (turn["trained_step"], turn["skip_reason"]) == (5, None)
    assert [reward["value"] for reward in shown["rewards"]] == [0.0, 1.0, 0.5]
    assert shown["outcome"] == "completed"
    assert "prompt_token_ids" not in json.loads(said(url, "show", "abc", "--json"))["turns"][0]


def test_show_of_an_open_rollout_that_another_dialect_made(store: Store, url: str) -> None:
    store.append([make_turn("t", "r", request=None, response=None)])
    text = said(url, "show", "r")
    assert "open since" in text
    assert "untitled" in text
    assert "not trained yet: open" in text


def test_ls_lists_the_newest_first_and_fits(store: Store, url: str) -> None:
    for n in range(5):
        facts = whole_rollout(
            f"{n:012x}{'0' * 20}",
            task="a-task-with-a-rather-long-name",
            at=n + 1,
            tags={"split": "held_out"},
            outcome=Outcome.INFRA_ERROR,
        )
        store.append(facts)
    for columns in (60, 80, 140):
        lines = said(url, "ls", "--limit", "4", columns=columns).splitlines()
        assert [line.split()[0] for line in lines[1:5]] == [f"{n:012x}" for n in (4, 3, 2, 1)]
        assert all("infra_error" in line for line in lines[1:5])
        assert lines[5] == "the 4 newest; more with --limit"
    assert "split=held_out" in lines[1]
    assert "a-task-with-a-rather-long-name" in lines[1]


def test_ls_filters(store: Store, url: str) -> None:
    store.append(whole_rollout("a", task="x", tags={"split": "train"}))
    store.append(whole_rollout("b", task="y", outcome=None))

    def ids(*wanted: str) -> list[str]:
        return [row["rollout_id"] for row in json.loads(said(url, "ls", "--json", *wanted))]

    assert sorted(ids()) == ["a", "b"]
    assert ids("--task", "y") == ["b"]
    assert ids("--tag", "split=train") == ["a"]
    assert ids("--outcome", "open") == ["b"]
    assert ids("--agent", "nobody") == []
    assert "no rollouts match" in said(url, "ls", "--agent", "nobody")


def test_an_empty_store_says_so(store: Store, url: str) -> None:
    assert said(url, "ls") == "no rollouts yet\n"
    assert said(url, "ls", "--json") == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["show", "q"], 1, "tracegrad: no rollout q"),
        (["show", "a"], 1, "tracegrad: several rollouts begin with a: a1, a2"),
        (["ls", "--store", "nonsense"], 2, "tracegrad: store: 'nonsense' is no URL"),
        (["ls", "--outcome", "good"], 2, "'good'; use open, completed"),
        (["ls", "--tag", "good"], 2, "'good'; write key=value"),
    ],
)
def test_mistakes_are_said_plainly(
    store: Store, url: str, arguments: list[str], code: int, line: str
) -> None:
    store.append([RolloutOpened(rollout_id="a1"), RolloutOpened(rollout_id="a2")])
    result = run(url, *arguments, columns=200)
    assert result.exit_code == code
    assert line in result.stderr
    assert result.stdout == ""


def test_a_missing_store_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Through the real entry point, in a folder where nothing ran yet."""
    done = subprocess.run(
        [sys.executable, "-c", "from tracegrad.cli import main; main()", "rollouts", "ls"],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"tracegrad: no store at {tmp_path}/.tracegrad/store.db")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_short_ids_stay_distinct() -> None:
    assert short_id_width(["0" * 32]) == 12
    assert short_id_width(["0" * 13 + "a", "0" * 13 + "b"]) == 14
    assert short_id_width(["ab", "abc"]) == 3
    assert short_id_width([]) == 0
