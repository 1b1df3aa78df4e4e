"""The agent as it is before anybody trains it."""

from typing import Any

import rllm
from openai import AsyncOpenAI
from rllm.eval.types import EvalOutput
from rllm.types import AgentConfig, Episode, Task, Trajectory
from warehouse import TOOLS, reward, run_tool

MAX_TURNS = 4


async def answer(question: str, config: AgentConfig) -> str | None:
    client = AsyncOpenAI(base_url=config.base_url, api_key="EMPTY")
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=config.model,
            messages=messages,
            tools=TOOLS,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


@rllm.rollout(name="assistant")
async def solve(task: Task, config: AgentConfig) -> Episode:
    said = await answer(str(task.instruction), config)
    return Episode(
        trajectories=[Trajectory(name="assistant", steps=[])],
        artifacts={"answer": said},
    )


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> EvalOutput:
    value = reward(episode.artifacts["answer"], task["expected"])
    return EvalOutput(reward=value, is_correct=value == 1.0)
