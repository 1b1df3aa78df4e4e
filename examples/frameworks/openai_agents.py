"""OpenAI's Agents SDK: an agent with a tool.

The proxy is served with TRACEGRAD_PROXY_SAMPLING=free: its tools are strict.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/openai_agents.py
"""

import os

from agents import Agent, Runner, function_tool
from tracegrad import trace  # 1

MODEL = os.environ.get("MODEL", "policy")


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


forecaster = Agent(name="forecaster", model=MODEL, tools=[weather])


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    return str(Runner.run_sync(forecaster, question).final_output)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
