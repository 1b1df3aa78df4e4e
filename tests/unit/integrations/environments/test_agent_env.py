"""An agent as an environment: its calls are the steps, in Gymnasium's own terms."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

import tracegrad
from support.proxy.servers import eventually
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad.store import RolloutSummary, Store
from tracegrad_integrations.environments import agent_env
from tracegrad_integrations.environments.agent_env import AgentEnv
from tracegrad_integrations.environments.env_proxy import EnvProxy

TASKS = [{"id": "sum", "a": 1, "b": 2}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('environments')}/store.db"


@pytest.fixture(scope="module")
def proxy(store_url: str) -> Iterator[EnvProxy]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRACEGRAD_API_KEY", raising=False)
        with EnvProxy(store_url) as opened:
            yield opened


def stored(store_url: str, rollout_id: str) -> RolloutSummary:
    """With its outcome."""

    def found() -> RolloutSummary | None:
        with Store.open(store_url) as store:
            rows = {row.rollout_id: row for row in store.rollouts(limit=None)}
        row = rows.get(rollout_id)
        return row if row is not None and row.outcome is not None else None

    row: RolloutSummary = eventually(found, 60)
    return row


def client_of(rollout: tracegrad.Rollout) -> openai.OpenAI:
    return openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0)


def ask(rollout: tracegrad.Rollout, text: str, **more: Any) -> Any:
    with client_of(rollout) as client:
        messages: Any = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(model="policy", messages=messages, **more)
        return answer.choices[0].message


def solve(task: Any, rollout: tracegrad.Rollout) -> float:
    """Once in one piece, once as a stream."""
    with client_of(rollout) as client:
        messages: Any = [{"role": "user", "content": f"{task['a']} + {task['b']}?"}]
        whole = client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": whole.choices[0].message.content})
        messages.append({"role": "user", "content": "sure?"})
        stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
        parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    return float("".join(parts) == str(task["a"] + task["b"]))


def test_requests_are_observations_and_replies_are_actions(proxy: EnvProxy, store_url: str) -> None:
    env = AgentEnv(solve, TASKS, proxy, tags={"split": "outside"})
    request, info = env.reset(seed=1)
    assert request["messages"] == [{"role": "user", "content": "1 + 2?"}]
    assert info == {"task_id": "sum"}
    request, reward, terminated, truncated, _ = env.step("4?")
    assert [each["content"] for each in request["messages"]] == ["1 + 2?", "4?", "sure?"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step({"content": "3"})
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info == {"task_id": "sum", "outcome": "completed", "reason": None}
    row = stored(store_url, env.rollout_id)
    assert (row.task_id, row.agent, row.reward, row.turns) == ("sum", "solve", 1.0, 2)
    assert row.tags["split"] == "outside"


def test_it_is_an_environment_to_gymnasium(proxy: EnvProxy) -> None:
    env = AgentEnv(solve, TASKS, proxy)
    check_env(env, skip_render_check=True)
    env.close()


def test_several_are_a_vector_of_gymnasiums(proxy: EnvProxy) -> None:
    """Which begins the next episode by itself."""

    def answer(task: Any, rollout: tracegrad.Rollout) -> float:
        return float(ask(rollout, task["id"]).content == "3")

    envs = SyncVectorEnv([lambda: AgentEnv(answer, TASKS, proxy) for _ in range(3)])
    requests, _ = envs.reset(seed=1)
    assert [each["messages"][0]["content"] for each in requests] == ["sum"] * 3
    _, rewards, terminated, _, _ = envs.step(["3", "4", "3"])
    assert (rewards.tolist(), terminated.tolist()) == ([1.0, 0.0, 1.0], [True] * 3)
    requests, _, terminated, _, _ = envs.step(["-"] * 3)
    assert [each["messages"][0]["content"] for each in requests] == ["sum"] * 3
    assert not any(terminated)
    envs.close()


def test_an_agent_of_another_dialect_gets_its_tool_calls(proxy: EnvProxy) -> None:
    def add(task: Any, rollout: tracegrad.Rollout) -> float:
        url = rollout.base_url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=url, api_key=rollout.api_key) as client:
            tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
            messages: Any = [{"role": "user", "content": "1 + 2?"}]
            answer = client.messages.create(
                model="policy", max_tokens=64, messages=messages, tools=tools
            )
        [block] = answer.content
        assert block.type == "tool_use"
        return float(sum(block.input.values()))

    env = AgentEnv(add, TASKS, proxy)
    request, _ = env.reset()
    assert [tool["function"]["name"] for tool in request["tools"]] == ["add"]
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    _, reward, terminated, *_ = env.step({"tool_calls": [call]})
    assert (reward, terminated) == (3.0, True)


class APIConnectionError(Exception):
    """By this name clients say that their server fails."""


def ends(error: Exception) -> Callable[..., Any]:
    def agent(task: Any, rollout: tracegrad.Rollout) -> float:
        ask(rollout, "hello")
        raise error

    return agent


def test_how_the_agent_ends_is_how_the_episode_ends(proxy: EnvProxy) -> None:
    env = AgentEnv(ends(ValueError("no tool")), TASKS, proxy)
    env.reset()
    _, reward, terminated, truncated, info = env.step("hi")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["outcome"], info["reason"]) == ("agent_error", "ValueError: no tool")

    env = AgentEnv(ends(APIConnectionError("away")), TASKS, proxy)
    env.reset()
    with pytest.raises(SandboxUnavailable, match="away"):
        env.step("hi")
    with pytest.raises(ValueError, match="no request waits"):
        env.step("again")

    env = AgentEnv(lambda task: 1 / 0, TASKS, proxy)
    with pytest.raises(BrokenEnvironment, match=r"ZeroDivisionError.*before any LLM call"):
        env.reset()

    env = AgentEnv(lambda task: 1.0, TASKS, proxy)
    with pytest.raises(BrokenEnvironment, match="ended without an LLM call"):
        env.reset()

    env = AgentEnv(lambda task, rollout: str(ask(rollout, "hello")), TASKS, proxy)
    env.reset()
    with pytest.raises(ValueError, match="the agent gave no reward"):
        env.step("hi")


def test_a_budget_that_is_used_up_truncates(proxy: EnvProxy) -> None:
    def dawdle(task: Any, rollout: tracegrad.Rollout) -> None:
        ask(rollout, "hello")
        tracegrad.reward(0.25)
        rollout.finish("budget", "ten turns")

    env = AgentEnv(dawdle, TASKS, proxy)
    env.reset()
    _, reward, terminated, truncated, info = env.step("hi")
    assert (reward, terminated, truncated) == (0.25, False, True)
    assert info["outcome"] == "budget"


def test_a_reset_aborts_what_runs_and_frees_the_agent(proxy: EnvProxy, store_url: str) -> None:
    freed: list[str] = []

    def stubborn(task: Any, rollout: tracegrad.Rollout) -> float:
        for _ in range(3):
            try:
                ask(rollout, "hello")
            except openai.BadRequestError as error:
                freed.append(error.message)
        return 1.0

    env = AgentEnv(stubborn, TASKS, proxy)
    env.reset()
    first = env.rollout_id
    env.reset()
    assert env.rollout_id != first
    assert stored(store_url, first).outcome == "aborted"
    eventually(lambda: len(freed) == 3, 60)
    env.close()
    assert "the episode is over" in freed[0]
    eventually(lambda: len(freed) == 6, 60)
    eventually(lambda: not {first, env.rollout_id} & {*proxy.upstream.calls}, 60)


def test_environments_run_beside_each_other_and_agents_call_in_parallel(proxy: EnvProxy) -> None:
    def both(task: Any, rollout: tracegrad.Rollout) -> float:
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(ask, rollout, f"{task} {n}") for n in (0, 1)]
            return float(all(one.result().content.endswith(f"{n}") for n, one in enumerate(asked)))

    envs = [AgentEnv(both, [name], proxy, task_id=str) for name in "abc"]
    said = Counter[str]()
    requests = [env.reset()[0] for env in envs]
    for _ in (0, 1):
        texts = [request["messages"][0]["content"] for request in requests]
        said.update(texts)
        steps = [env.step(f"re {text}") for env, text in zip(envs, texts, strict=True)]
        requests = [step[0] for step in steps]
    assert [(step[1], step[2]) for step in steps] == [(1.0, True)] * 3
    assert said == {f"{name} {n}": 1 for name in "abc" for n in (0, 1)}


def test_calls_of_nobodys_rollout_are_refused(proxy: EnvProxy) -> None:
    with tracegrad.rollout("stray") as rollout, pytest.raises(openai.BadRequestError) as refused:
        ask(rollout, "hello")
    assert "no environment's" in refused.value.message


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (3, "neither a text nor"),
        ({}, "neither content nor tool_calls"),
        ({"content": 3}, "content is a text"),
        ({"tool_calls": ["add"]}, "tool_calls: 'add' is not"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": 3}}]}, "is not"),
    ],
)
def test_actions_that_are_no_replies_are_named(proxy: EnvProxy, action: Any, said: str) -> None:
    env = AgentEnv(solve, TASKS, proxy)
    assert not env.action_space.contains(action)
    with pytest.raises(ValueError, match=said):
        env.step(action)


def test_there_is_one_proxy_at_a_time_and_it_takes_back_the_variable(
    proxy: EnvProxy, tmp_path: Path
) -> None:
    assert os.environ["TRACEGRAD_URL"] == proxy.url
    with pytest.raises(ValueError, match="one is open in this process"), EnvProxy():
        pass
    assert os.environ["TRACEGRAD_URL"] == proxy.url


def test_without_gymnasium_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tracegrad\[gymnasium\]'"):
        importlib.reload(agent_env)
