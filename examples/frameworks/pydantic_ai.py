"""An agent of Pydantic AI with a tool.

The proxy is served with TRACEGRAD_PROXY_SAMPLING=free: its tools are strict.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/pydantic_ai.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from pydantic_ai import Agent

from tracegrad import trace  # 1


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = "openai-chat:" + os.environ.get("MODEL", "policy")
    agent = Agent(model, name="forecaster", tools=[weather])
    return agent.run_sync(question).output


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
