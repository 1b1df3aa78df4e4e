"""A ToolCallingAgent of smolagents.

The proxy is served with TRACEGRAD_PROXY_SAMPLING=free: it asks for a tool call in every reply.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/smolagents.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from smolagents import OpenAIModel, ToolCallingAgent, tool

from tracegrad import trace  # 1


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = OpenAIModel(os.environ.get("MODEL", "policy"))
    agent = ToolCallingAgent(tools=[weather], model=model, name="forecaster", verbosity_level=0)
    return str(agent.run(question))


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
