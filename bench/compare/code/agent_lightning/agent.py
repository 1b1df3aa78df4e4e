"""The agent as it is before anybody trains it."""

import os
from typing import Any

import httpx
from openai import AsyncOpenAI
from warehouse import TOOLS, reward, run_tool

MAX_TURNS = 4
KEY = os.environ["AGL_KEY"]
client = AsyncOpenAI(
    base_url=os.environ["AGL_OPENAI_BASE_URL"],
    api_key=KEY,
    max_retries=6,  # the gateway answers 429 while weights are pushed
)


async def answer(question: str) -> str | None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model="gpt-4.1-mini",
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


class Assistant:
    async def run(self) -> None:
        said = await answer(os.environ["QUESTION"])
        httpx.post(  # noqa: ASYNC210 - as in its example
            os.environ["AGL_EVENT_URL"],
            json={
                "event_type": "reward",
                "data": {"value": reward(said, os.environ["EXPECTED"])},
            },
            headers={"Authorization": f"Bearer {KEY}"},
        ).raise_for_status()
