"""Anthropic's SDK: a loop of one's own around Messages.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/anthropic.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

import anthropic

from tracegrad import trace  # 1


def weather(city: str) -> str:
    return f"Rain in {city}."


WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    client = anthropic.Anthropic()
    messages = [{"role": "user", "content": question}]
    while True:
        reply = client.messages.create(
            model=os.environ.get("MODEL", "policy"),
            max_tokens=1_000,
            tools=[WEATHER],
            messages=messages,
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
            for call in calls
        ]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results},
        ]


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
