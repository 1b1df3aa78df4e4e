"""A crew of one agent of CrewAI.

The proxy is served with TRACEGRAD_PROXY_SAMPLING=free: its tools are strict.

export CREWAI_DISABLE_TELEMETRY=true CREWAI_TRACING_ENABLED=false
export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/crewai.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from tracegrad import trace  # 1


@tool("weather")
def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = LLM(
        "openai/" + os.environ.get("MODEL", "policy"), base_url=os.environ["OPENAI_BASE_URL"]
    )
    forecaster = Agent(
        role="forecaster", goal="Know the weather", backstory="Old", tools=[weather], llm=model
    )
    task = Task(description=question, expected_output="A sentence", agent=forecaster)
    return str(Crew(agents=[forecaster], tasks=[task]).kickoff().raw)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
