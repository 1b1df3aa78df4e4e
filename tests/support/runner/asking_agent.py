"""An agent that is a command: it asks the model once."""

from __future__ import annotations

import sys

# Writes the answer into a file of its folder.
SOURCE = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]})
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    body.encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))
open("answer.txt", "a").write(answer["choices"][0]["message"]["content"] or "")
print("asked", flush=True)
"""
ASK = (sys.executable, "-c", SOURCE)
# Opens a rollout by itself, and rewards it.
TRACED_SOURCE = """
import os, urllib.request
from tracegrad import rollout
with rollout("its own") as own:
    os.environ.update(own.environ)
    exec(os.environ["ASK"])
    own.reward(1.0)
"""
TRACED = (sys.executable, "-c", TRACED_SOURCE)
