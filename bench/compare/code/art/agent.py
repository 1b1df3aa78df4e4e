"""The agent as it is before anybody trains it."""

from typing import Any

import art
from warehouse import TOOLS, reward, run_tool

MAX_TURNS = 4


async def answer(model: art.TrainableModel, question: str) -> str | None:
    client = model.openai_client()
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=messages,
            tools=TOOLS,
            logprobs=True,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


async def rollout(model: art.TrainableModel, task: dict[str, str]) -> art.Trajectory:
    with art.Trajectory() as trajectory:
        said = await answer(model, task["question"])
    trajectory.reward = reward(said, task["expected"])
    return trajectory
