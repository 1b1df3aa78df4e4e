"""Run by OpenEnv's Python: episodes of both environments of `openenv_server.py`, as rollouts.

play_openenv.py GUESSING_URL TOOLS_URL NOBODY_URL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import openai

import tracegrad
from tracegrad_integrations.environments.episode import Act, episode_agent
from tracegrad_integrations.environments.openenv_client import OpenEnvSession, tool_action


def guess(rollout: tracegrad.Rollout) -> Act:
    """The model says the fields of an action."""
    client = openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0)

    def act(observation: Mapping[str, Any], info: Mapping[str, Any]) -> Any:
        messages: Any = [{"role": "user", "content": observation["text"]}]
        answer = client.chat.completions.create(model="policy", messages=messages)
        return json.loads(answer.choices[0].message.content or "")

    return act


def use_tools(rollout: tracegrad.Rollout) -> Act:
    client = openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0)

    def act(observation: Mapping[str, Any], info: Mapping[str, Any]) -> Any:
        messages: Any = [{"role": "user", "content": json.dumps(observation)}]
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=info["tools"]
        )
        calls = answer.choices[0].message.tool_calls
        assert calls, "the script calls a tool"
        return tool_action(calls[0])

    return act


def main(guessing: str, adding: str, nobody: str) -> None:
    greeted = {"greeting": "what is it?"}
    for agent, tasks in (
        (
            episode_agent(lambda task: OpenEnvSession(guessing, reset=greeted), guess),
            [{"id": name, "seed": 23} for name in ("guess", "wrong", "falls", "text")],
        ),
        (
            episode_agent(lambda task: OpenEnvSession(adding, tools=True), use_tools),
            [{"id": "add"}, {"id": "no-tool"}],
        ),
        (
            episode_agent(lambda task: OpenEnvSession(nobody, connect_s=2), guess),
            [{"id": "nobody", "seed": 1}],
        ),
    ):
        tracegrad.run(agent, train=tasks, concurrency=1, retries=0)
    session = OpenEnvSession(guessing)
    session.reset(seed=1)
    session.step({"number": 1})
    print(json.dumps(session.state()))
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
