"""A program of DSPy: ChainOfThought.

TRACEGRAD_URL=http://127.0.0.1:4141 python examples/frameworks/dspy.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

import dspy

from tracegrad import instrument, trace  # 1

print("spans of:", *instrument())  # 2


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 3
def solve(question: str) -> str:
    model = dspy.LM(
        "openai/" + os.environ.get("MODEL", "policy"),
        # With its cache the second attempt would be the first one's answer.
        cache=False,  # 4
    )
    with dspy.context(lm=model):
        return str(dspy.ChainOfThought("question -> answer")(question=question).answer)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
