"""AutoGen's AssistantAgent.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/autogen.py
"""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tracegrad import trace  # 1


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    return asyncio.run(_run(question))


async def _run(question: str) -> str:
    model = OpenAIChatCompletionClient(
        model=os.environ.get("MODEL", "policy"),
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
            "family": "unknown",
        },
    )
    agent = AssistantAgent(
        "forecaster",
        model,
        tools=[weather],
        # `reflect_on_tool_use` would leave the tools out of the second call, which forks.
        max_tool_iterations=3,  # 3
    )
    return str((await agent.run(task=question)).messages[-1].content)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
