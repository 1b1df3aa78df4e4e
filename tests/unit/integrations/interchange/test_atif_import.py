"""`tracegrad import` of trajectories that others wrote."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.transfer.template_store import TOOLS, fill
from tracegrad.cli.app import app
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.store.read.turn_scopes import load_turn_scopes
from tracegrad.transfer import find_layout
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad.transfer.jsonl import line_of

# As terminus-2 writes them, with a call of a sub-agent's.
HARBORS: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "session_id": "run-7",
    "agent": {"name": "terminus-2", "version": "2.0.0", "model_name": "qwen", "extra": {"p": 1}},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Use the shell."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "Make hello.txt"}]},
        {
            "step_id": 3,
            "timestamp": "2026-10-01T10:00:00Z",
            "source": "agent",
            "message": "I write it.",
            "reasoning_content": "easy",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "bash", "arguments": {"cmd": "echo hi"}}
            ],
            "observation": {"results": [{"source_call_id": "c1", "content": "done"}]},
            "metrics": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "cost_usd": 0.25,
                "prompt_token_ids": [1, 2, 3],
                "completion_token_ids": [4, 5],
                "logprobs": [-0.5, -0.25],
            },
        },
        {
            "step_id": 4,
            "timestamp": "2026-10-01T10:00:02Z",
            "source": "agent",
            "model_name": "qwen-large",
            "message": "Finished.",
            "observation": {"results": [{"content": "new output"}]},
            "metrics": {
                "prompt_token_ids": [1, 2, 3, 4, 5, 6],
                "completion_token_ids": [7],
                "logprobs": [-1.0],
            },
        },
        {"step_id": 5, "source": "agent", "message": "Saved.", "llm_call_count": 0},
        {"step_id": 6, "source": "agent", "message": "Bye.", "colour": "red"},
    ],
    "notes": "kept",
    "final_metrics": {"total_cost_usd": 0.5},
    "extra": {"reward": 0.75, "verifier": "pytest"},
    "subagent_trajectories": [
        {
            "schema_version": "ATIF-v1.7",
            "trajectory_id": "summary",
            "agent": {"name": "summariser", "version": "1"},
            "steps": [
                {"step_id": 1, "source": "user", "message": "Sum up."},
                {"step_id": 2, "source": "agent", "message": "A file was made."},
            ],
        }
    ],
}


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'target.db'}") as store:
        yield store


def run(store: Store, *arguments: str, text: str | bytes) -> Result:
    url = f"sqlite:///{store.database.describe()}"
    return CliRunner().invoke(app, ["import", *arguments], env={"TRACEGRAD_STORE": url}, input=text)


def turns_of(store: Store) -> list[Turn]:
    [row] = store.rollouts()
    return list(store.rollout_turns(row.rollout_id))


def test_a_trajectory_of_harbors_is_a_rollout(target: Store) -> None:
    indented = json.dumps(HARBORS, indent=2)  # as Harbor's files are
    done = run(target, "-", text=indented)
    assert done.stdout == "1 rollout: 1 new, 4 new turns, 1 new reward\n", done.output
    assert run(target, "-", text=json.dumps(HARBORS)).stdout == "1 rollout: 0 new\n"
    [row] = target.rollouts()
    assert (row.agent, row.outcome, row.reward) == ("terminus-2", "completed", 0.75)
    assert row.tags == {"session_id": "run-7"}
    assert target.rollout(row.rollout_id).task == {
        "atif": {
            "agent": {"version": "2.0.0", "extra": {"p": 1}},
            "steps": {"2": {"metrics": {"cost_usd": 0.25}}, "5": {"colour": "red"}},
            "notes": "kept",
            "final_metrics": {"total_cost_usd": 0.5},
            "extra": {"verifier": "pytest"},
            "subagent_trajectories": {
                "0": {"trajectory_id": "summary", "agent": {"name": "summariser", "version": "1"}}
            },
        }
    }


def test_turns_with_tokens_can_be_trained_and_the_others_are_text(target: Store) -> None:
    run(target, "-", text=json.dumps(HARBORS))
    first, second, bye, summary = turns_of(target)
    assert first.untrainable is None
    assert first.prompt_token_ids.tolist() == [1, 2, 3]
    assert first.completion_token_ids.tolist() == [4, 5]
    assert first.completion_logprobs.tolist() == [-0.5, -0.25]
    assert first.policy_versions == ((0, 2),)
    assert (second.parent_id, second.prompt_token_ids.tolist()) == (
        first.turn_id, [1, 2, 3, 4, 5, 6],
    )  # fmt: skip
    assert (second.model, second.created_at - first.created_at) == ("qwen-large", 2.0)
    assert [turn.untrainable for turn in (bye, summary)] == ["no_tokens"] * 2
    assert (bye.parent_id, summary.parent_id) == (None, None)
    assert bye.request is not None
    assert [(each["role"], each["content"]) for each in bye.request["messages"]] == [
        ("system", "Use the shell."),
        ("user", "Make hello.txt"),
        ("assistant", "I write it."),
        ("tool", "done"),
        ("assistant", "Finished."),
        ("user", "new output"),
        ("assistant", "Saved."),
    ]
    [call] = bye.request["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "bash", "arguments": '{"cmd":"echo hi"}'}


def test_the_turns_of_an_embedded_trajectory_are_its_agents(target: Store) -> None:
    """However deep it lies; those of the rollout's own agent say none."""
    changed = copy.deepcopy(HARBORS)
    [summary] = changed["subagent_trajectories"]
    checker = {"name": "checker", "model_name": "qwen"}
    again = {"name": "terminus-2", "model_name": "qwen"}
    summary["subagent_trajectories"] = [
        {**summary, "agent": checker},
        {**summary, "agent": again, "subagent_trajectories": [{**summary, "agent": checker}]},
    ]
    run(target, "-", text=json.dumps(changed))
    assert [turn.agent_name for turn in turns_of(target)] == [
        *(None, None, None),
        *("summariser", "checker", None, "checker"),
    ]
    [row] = target.rollouts()
    with target.reading() as connection:
        scopes = load_turn_scopes(connection, [row.rollout_id])
    by_agent = Counter(scope.agent for scope in scopes.values())
    assert by_agent == {"terminus-2": 4, "summariser": 1, "checker": 2}


def test_images_make_a_turn_untrainable(target: Store) -> None:
    changed = copy.deepcopy(HARBORS)
    source = {"media_type": "image/png", "path": "a.png"}
    changed["steps"][1]["message"].append({"type": "image", "source": source})
    run(target, "-", text=json.dumps(changed))
    first, *_ = turns_of(target)
    assert first.untrainable == "media"


def test_attempts_at_one_task_are_a_group_that_waits_to_be_trained(target: Store) -> None:
    """As those do that began with the same words."""
    another = copy.deepcopy(HARBORS) | {"session_id": "run-8", "extra": {"reward": 0.0}}
    other_task = copy.deepcopy(HARBORS) | {"extra": {"reward": 1.0, "task_id": "made-up"}}
    for trajectory in (HARBORS, another, other_task):
        run(target, "-", text=json.dumps(trajectory))
    tasks = [row.task_id for row in target.rollouts() if row.task_id != "made-up"]
    assert len(tasks) == 2
    assert len(set(tasks)) == 1
    assert target.turn_counts().skipped == {}
    assert set(target.turn_counts().pending) == {"waiting"}


def test_a_trajectory_without_times_has_that_of_its_first_import(target: Store) -> None:
    changed = copy.deepcopy(HARBORS)
    for step in changed["steps"]:
        step.pop("timestamp", None)
    assert "1 new" in run(target, "-", text=json.dumps(changed)).stdout
    first, *_ = turns_of(target)
    assert first.created_at > 1.7e9
    assert run(target, "-", text=json.dumps(changed)).stdout == "1 rollout: 0 new\n"


BROKEN = [
    (("schema_version",), "ATIF-v2.0", "schema_version: 'ATIF-v2.0'; this tracegrad reads ATIF-v1"),
    (("steps",), "[", "steps: it is a text and no JSON; write objects"),
    (("agent",), None, "agent: it is missing or null; write an object"),
    (("steps", 1, "message"), 3, "steps[1].message: 3 is a number; write a text or a list of"),
    (("steps", 1, "source"), "tool", "steps[1].source: 'tool'; write one of "),
    (("steps", 3, "step_id"), 9, "steps[3].step_id: 9; write 4: steps are numbered from 1"),
    (("steps", 2, "timestamp"), "noon", "steps[2].timestamp: 'noon'; write a time as ISO 8601"),
    (("steps", 2, "metrics", "logprobs"), [-1.0], "steps[2].metrics.logprobs: 1 for 2 sampled"),
    (("steps", 2, "metrics", "logprobs", 1), "x", "steps[2].metrics.logprobs[1]: it is a text"),
    (("steps", 2, "metrics", "prompt_token_ids", 0), -1, "steps[2].metrics.prompt_token_ids[0]"),
    (("steps", 2, "extra"), {"tracegrad": 1}, "steps[2].extra.tracegrad: write an object"),
    (
        ("steps", 2, "extra"),
        {"tracegrad": {"policy_versions": [[3, 1]]}},
        "steps[2].extra.tracegrad.policy_versions: they cover 1 of 2 sampled tokens; cover all",
    ),
    (("extra", "reward"), "good", "extra.reward: 'good'; write a finite number"),
    (
        ("subagent_trajectories", 0, "steps", 1, "message"),
        [{"type": "video"}],
        "subagent_trajectories[0].steps[1].message[0].type: 'video'; write a text, image or audio",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN, ids=[m[:40] for *_, m in BROKEN])
def test_bad_trajectories_are_named(
    target: Store, path: tuple[Any, ...], value: Any, message: str
) -> None:
    changed = copy.deepcopy(HARBORS)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    done = run(target, "-", text=json.dumps(changed))
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tracegrad: -:1: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert target.rollouts() == []


@pytest.mark.parametrize("layout", ["atif", "openenv-trace"])
def test_tables_are_read_too(target: Store, tmp_path: Path, layout: str) -> None:
    """And what a store has is known to it in every form."""
    url = f"sqlite:///{target.database.describe()}"
    fill(target)
    for name in ("rows.parquet", "rows.jsonl"):
        path = str(tmp_path / name)
        export = ["export", "--store", url, "--layout", layout, "-o", path]
        assert CliRunner().invoke(app, export).exit_code == 0
        assert run(target, path, text="").stdout == "10 rollouts: 0 new\n"


def test_our_own_come_back_by_the_commands(target: Store, tmp_path: Path) -> None:
    """With tools, forks, and the texts of a store."""
    with Store.open(f"sqlite:///{tmp_path / 'source.db'}") as source:
        fill(source)
        export = RolloutExport(store=source)
        lines = [line_of(row) for row in export.layout(find_layout("atif"))]
        there = {row.rollout_id: source.rollout_turns(row.rollout_id) for row in source.rollouts()}
    done = run(target, "-", text=b"".join(lines))
    assert done.stdout == "10 rollouts: 10 new, 13 new turns, 8 new rewards\n", done.output
    for rollout_id, turns in there.items():
        back = target.rollout_turns(rollout_id)
        for field in ("turn_id", "parent_id", "prompt_token_ids", "completion_logprobs"):
            assert [getattr(turn, field) for turn in back] == [getattr(t, field) for t in turns]
    [d1] = [json.loads(line) for line in lines if b'"trajectory_id":"d1"' in line]
    [fork] = d1["subagent_trajectories"]
    assert [step.get("is_copied_context") for step in fork["steps"]] == [True, True, None, None]
    [c1] = [json.loads(line) for line in lines if b'"trajectory_id":"c1"' in line]
    assert c1["agent"]["tool_definitions"] == TOOLS
    assert c1["steps"][1]["observation"]["results"][0]["content"] == "17"
