"""A program of DSPy: ChainOfThought.

export TRACEGRAD_URL=http://127.0.0.1:4141 TRACEGRAD_INSTRUMENT=1
python examples/frameworks/dspy.py
"""

import os
import sys

sys.path.pop(0)  # this file has the name of the package that it imports

import dspy

from tracegrad import trace  # 1


@trace(environ=True, reward=lambda answer: "rain" in answer.lower())  # 2
def solve(question: str) -> str:
    model = dspy.LM(
        "openai/" + os.environ.get("MODEL", "policy"),
        # With its cache the second attempt would be the first one's answer.
        cache=False,  # 3
    )
    with dspy.context(lm=model):
        return str(dspy.ChainOfThought("question -> answer")(question=question).answer)


if __name__ == "__main__":
    for _ in range(2):  # attempts at one task
        print(solve("What is the weather in Ulm?"))
