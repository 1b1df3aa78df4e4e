"""An agent of Strands.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/strands.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from strands import Agent, tool
from strands.models.openai import OpenAIModel

from tracegrad import trace  # 1


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = OpenAIModel(model_id=os.environ.get("MODEL", "policy"))
    agent = Agent(model=model, name="forecaster", tools=[weather], callback_handler=None)
    return str(agent(question))


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
