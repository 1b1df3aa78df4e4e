"""A ToolCallingAgent of smolagents.

TRACEGRAD_URL=http://127.0.0.1:4141 python examples/frameworks/smolagents.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from smolagents import OpenAIModel, ToolCallingAgent, tool

from tracegrad import instrument, trace  # 1

print("spans of:", *instrument())  # 2


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 3
def solve(question: str) -> str:
    model = OpenAIModel(
        os.environ.get("MODEL", "policy"),
        # "required", which is the default, bends what the model samples.
        tool_choice="auto",  # 4
    )
    agent = ToolCallingAgent(tools=[weather], model=model, name="forecaster", verbosity_level=0)
    return str(agent.run(question))


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
