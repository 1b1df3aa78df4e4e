"""An agent of AG2, which makes its own spans.

TRACEGRAD_URL=http://127.0.0.1:4141 python examples/frameworks/ag2.py
"""

import asyncio
import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from ag2 import Agent, tool
from ag2.config import OpenAIConfig
from ag2.middleware import TelemetryMiddleware  # 4

from tracegrad import instrument, trace  # 1

print("spans of:", *instrument())  # 2


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 3
def solve(question: str) -> str:
    model = OpenAIConfig(model=os.environ.get("MODEL", "policy"))
    agent = Agent(
        "forecaster",
        config=model,
        tools=[weather],
        middleware=[TelemetryMiddleware(agent_name="forecaster")],  # 5
    )
    return asyncio.run(_run(agent, question))


async def _run(agent: Agent, question: str) -> str:
    return str((await agent.ask(question)).body)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
