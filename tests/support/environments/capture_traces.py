"""Run by OpenEnv's Python: the calls on standard input, one rollout a line, as its capture keeps
them and hands them to trainers."""

from __future__ import annotations

import json
import sys
from typing import Any

from openenv.core.harness import TrainingTrace
from openenv.core.harness.capture import RolloutGraph, TurnNode, to_trace_entries


def captured(calls: list[dict[str, Any]]) -> TrainingTrace:
    graph = RolloutGraph()
    for call in calls:
        graph.add_turn(TurnNode(**call["node"]))
    rows = [{"role": "agent", "node_ids": each.node_ids} for each in graph.sequences()]
    entries = to_trace_entries(graph, {"sequences": rows})
    for entry, call in zip(entries, calls, strict=True):
        entry["metadata"] |= call["metadata"]
    return TrainingTrace.from_entries(entries)


for line in sys.stdin:
    print(captured(json.loads(line)).model_dump_json())
