"""LlamaIndex's FunctionAgent.

The proxy is served with TRACEGRAD_PROXY_SAMPLING=free: its temperature is 0.1.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/llama_index.py
"""

import asyncio
import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from tracegrad import trace  # 1


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = OpenAILike(
        model=os.environ.get("MODEL", "policy"),
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(name="forecaster", tools=[weather], llm=model)
    return asyncio.run(_run(agent, question))


async def _run(agent: FunctionAgent, question: str) -> str:
    return str(await agent.run(question))


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
