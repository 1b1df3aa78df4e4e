"""What a first user of the wheel runs: programs that need the SDK and the standard library."""

# One rollout, with one LLM call to the proxy, and a reward. `environ=True` has the rollout's base
# URL and key in the environment, where programs without a client library of a vendor look.
TRACED_CALL = """
import json, os, urllib.request
import tracegrad
from tracegrad import reward, trace

@trace(task="sum", environ=True)
def solve(question):
    body = {"model": "m", "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    reward(1.0)
    return said

print(solve("2 + 2"))
assert tracegrad.flush(60)
assert not any(tracegrad.stats().dropped.values()), tracegrad.stats()
"""

# What a type-checker says of the three packages in an environment that has the wheel alone.
TYPED = """
import tracegrad_integrations  # which has types: mypy says so of one that has none
import tracegrad_trainer
from tracegrad import Rollout, reward, trace

@trace
def solve(question: str) -> int:
    return len(question)

reveal_type(solve)
reveal_type(tracegrad_trainer.__version__)
reward("much")
"""
