"""The agent as it is before anybody trains it."""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI
from warehouse import TOOLS, run_tool

MAX_TURNS = 4
client = AsyncOpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY


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


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[1])))
