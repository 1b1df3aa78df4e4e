"""Run by OpenEnv's Python: each line of standard input as OpenEnv's own training trace."""

from __future__ import annotations

import json
import sys

from openenv.core.harness import TrainingTrace

for line in sys.stdin:
    trace = TrainingTrace.model_validate_json(line)
    assert trace.model_dump() == json.loads(line), "it is not kept whole"
    # What trainers and viewers are given of it.
    entries = trace.to_trace_entries()
    assert [entry["metadata"]["node_id"] for entry in entries] == [
        turn.node_id for turn in trace.turns
    ]
    print(len(trace.turns))
