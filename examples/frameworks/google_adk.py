"""An agent of Google's ADK, which speaks Gemini's dialect.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/google_adk.py
"""

import asyncio
import os

from google.adk.agents import Agent
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner

from tracegrad import trace  # 1


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = Gemini(model=os.environ.get("MODEL", "policy"))
    forecaster = Agent(name="forecaster", model=model, tools=[weather])
    return asyncio.run(_run(forecaster, question))


async def _run(agent: Agent, question: str) -> str:
    events = await InMemoryRunner(agent=agent).run_debug(question, quiet=True)
    return events[-1].content.parts[-1].text


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
