"""An agent of AG2.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/ag2.py
"""

import asyncio
import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from ag2 import Agent, tool
from ag2.config import OpenAIConfig

from tracegrad import trace  # 1


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = OpenAIConfig(model=os.environ.get("MODEL", "policy"))
    agent = Agent("forecaster", config=model, tools=[weather])
    return asyncio.run(_run(agent, question))


async def _run(agent: Agent, question: str) -> str:
    return str((await agent.ask(question)).body)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
