"""Real CLI agents, unmodified and shut in with the proxy, against an engine that plays a script."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from support.cli_agents.recipes import AGENTS, SECRET, TASK, Agent
from support.cli_agents.scene import ROLLOUT, Run, play
from support.cli_agents.scripted_engine import ScriptedEngine
from support.engines.mock_engine import logprobs_of
from support.proxy.servers import serving
from tracegrad.events import Turn, logprob_array, token_id_array
from tracegrad.turn_tree import paths

pytestmark = [pytest.mark.agents, pytest.mark.timeout(900)]  # the first run installs them

# The two that speak neither chat completions nor each other's dialect.
EVERY_TIME = ("codex", "claude-code")


def scripted(agent: Agent, folder: Path) -> tuple[Run, ScriptedEngine]:
    engine = ScriptedEngine(script=agent.script)
    with serving(engine.app(), lifespan="off") as url:
        return play(agent, url, folder), engine


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow, id=name)
        for name in AGENTS
    ],
)
def test_it_does_its_task_and_every_call_is_a_turn(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    run, engine = scripted(agent, tmp_path)

    assert run.exit_code == 0, run.output + run.proxy_log
    assert (run.work / "hello.txt").read_text() == "hi"
    assert "Traceback" not in run.proxy_log
    assert run.rollouts == [ROLLOUT]
    assert {turn.dialect for turn in run.turns} == {agent.recipe.dialect}
    assert_none_lost_or_doubled(engine, run.turns)
    assert_main_thread_is_one_path(engine, run.turns)
    assert json.dumps(TASK)[1:-1] in json.dumps(engine.requests)
    kept = json.dumps([[turn.request, turn.response, turn.sampling] for turn in run.turns])
    assert SECRET not in kept + run.proxy_log


def assert_none_lost_or_doubled(engine: ScriptedEngine, turns: list[Turn]) -> None:
    """Each answer of the engine is one turn, with the very tokens that it told."""
    answered = {answer.completion_id: answer for answer in engine.answered}
    assert len(answered) == len(engine.requests)
    assert Counter(completion_id(turn) for turn in turns) == Counter(answered.keys())
    for turn in turns:
        answer = answered[completion_id(turn)]
        sampled = answer.said.token_ids
        assert turn.prompt_token_ids == token_id_array(answer.prompt_ids)
        assert turn.completion_token_ids == token_id_array(sampled)
        assert turn.completion_logprobs == logprob_array(logprobs_of(sampled))
        assert turn.untrainable is None


def assert_main_thread_is_one_path(engine: ScriptedEngine, turns: list[Turn]) -> None:
    main = {a.completion_id for a in engine.answered if engine.script.is_main(a.request)}
    [path] = [path for path in paths(turns) if completion_id(path[0]) in main]
    assert {completion_id(turn) for turn in path} == main
    assert len(path) == len(engine.script.steps)


def completion_id(turn: Turn) -> str:
    assert turn.response is not None
    return str(turn.response["id"])
