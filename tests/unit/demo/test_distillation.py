"""`make distillation`: the teacher, what is imitated of it, and what must come of it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from examples.distillation import __main__ as distillation
from examples.distillation import imitate, teacher
from examples.distillation.record import Recording
from examples.shop import agent, tasks
from examples.shop.rollouts import Score


def answer_of(task: tasks.Task) -> str | None:
    """What the shop's agent comes to with the teacher as its model."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    for _ in range(agent.MAX_TURNS):
        reply = teacher.reply(messages)
        messages.append(reply)
        calls = reply.get("tool_calls")
        if not calls:
            return str(reply["content"])
        for call in calls:
            result = agent.run_tool(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return None


def test_the_teacher_is_right_but_where_it_slips() -> None:
    asked = [*islice(tasks.train_tasks(0), 300), *tasks.exam("held_out", 90)]
    right = [task.reward(answer_of(task)) == 1.0 for task in asked]
    assert right == [not teacher.slips(task.question) for task in asked]
    assert 0.7 < sum(right) / len(right) < 0.9
    assert {task.kind for task in asked} == set(tasks.KINDS)


def test_a_question_that_the_shop_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="the teacher knows nothing of 'Why"):
        teacher.reply([{"role": "user", "content": "Why?"}])


def test_it_answers_as_an_api_does() -> None:
    [task] = tasks.exam("held_out", 1)
    asked = {"model": "teacher", "messages": [{"role": "user", "content": task.question}]}
    with teacher.answering() as url:
        answer = httpx.post(f"{url}/chat/completions", json=asked, trust_env=False)
        wrong = httpx.post(f"{url}/chat/completions", json={"messages": []}, trust_env=False)
    [choice] = answer.raise_for_status().json()["choices"]
    assert choice == {
        "index": 0,
        "message": teacher.reply(asked["messages"]),  # type: ignore[arg-type]
        "finish_reason": "tool_calls",
    }
    assert wrong.status_code == 400


def test_what_the_command_says_is_read_even_half_written() -> None:
    lines = [
        {"event": "data", "rollouts": 50},
        {"event": "held_out", "loss": 0.5},
        {"event": "step", "step": 7},
        {"event": "held_out", "loss": 0.25},
    ]
    text = "a warning\n" + "\n".join(map(json.dumps, lines)) + '\n{"event": "st'
    found = imitate.result(imitate.records(text), Path("m"))
    assert (found.losses, found.steps, found.data["rollouts"]) == ((0.5, 0.25), 7, 50)
    assert imitate.describe(imitate.records(text)) == "7 steps  held-out loss 0.50 → 0.25"


def test_only_what_was_right_is_imitated() -> None:
    recording = Recording("sqlite:///s.db", Score(3, 4))
    words = imitate.command(Path("m"), recording, Path("f"), epochs=3)
    assert words[words.index("--min-reward") + 1] == "1"
    assert words[words.index("--store") + 1] == "sqlite:///s.db"


WELL = {
    "sft_losses": [0.5, 0.3],
    "policy_versions": 20,
    "sampled_before": 0.3,
    "sampled_sft": 0.5,
    "sampled_after": 0.8,
}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"sft_losses": [0.5, 0.5]}, "the held-out loss of trainer sft did not fall"),
        ({"policy_versions": 19}, "19 policy versions of 20"),
        ({"sampled_sft": 0.35}, "trainer sft: sampled success rose by +0.05; +0.10 is due"),
        ({"sampled_after": 0.55}, "trainer serve: sampled success rose by +0.05; +0.10 is due"),
    ],
)
def test_each_stage_must_add_something(changed: dict[str, Any], problem: str | None) -> None:
    found = distillation.problems(WELL | changed, 20, short=False)
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)
    # Exams of the short form say nothing of rises.
    short = distillation.problems(WELL | changed, 20, short=True)
    assert short == [line for line in found if "sampled" not in line]
