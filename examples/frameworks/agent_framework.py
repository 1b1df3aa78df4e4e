"""An agent of Microsoft's Agent Framework.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/agent_framework.py
"""

import asyncio
import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

from tracegrad import trace  # 1


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    client = OpenAIChatCompletionClient(
        os.environ.get("MODEL", "policy"), base_url=os.environ["OPENAI_BASE_URL"]
    )
    agent = Agent(client, name="forecaster", tools=[weather])
    return asyncio.run(_run(agent, question))


async def _run(agent: Agent, question: str) -> str:
    return (await agent.run(question)).text


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
