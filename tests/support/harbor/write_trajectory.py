"""Run by Harbor's Python: a trajectory as Harbor's agents write theirs. write_trajectory.py FILE"""

from __future__ import annotations

import sys
from pathlib import Path

from harbor.models.trajectories import (
    Agent,
    FinalMetrics,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    ToolCall,
    Trajectory,
)
from harbor.utils.trajectory_utils import format_trajectory_json

call = ToolCall(tool_call_id="c1", function_name="delegate", arguments={"to": "helper"})
answer = ObservationResult(
    source_call_id="c1",
    content="done",
    subagent_trajectory_ref=[SubagentTrajectoryRef(trajectory_id="helper")],
)
tokens = Metrics(
    prompt_tokens=3,
    completion_tokens=2,
    prompt_token_ids=[1, 2, 3],
    completion_token_ids=[4, 5],
    logprobs=[-0.5, -0.25],
)
helper = Trajectory(
    trajectory_id="helper",
    agent=Agent(name="helper", version="1"),
    steps=[
        Step(step_id=1, source="user", message="Help."),
        Step(step_id=2, source="agent", message="I do."),
    ],
)
trajectory = Trajectory(
    session_id="run-1",
    agent=Agent(name="terminus-2", version="2.0.0", model_name="qwen"),
    steps=[
        Step(step_id=1, source="user", message="Make hello.txt"),
        Step(
            step_id=2,
            timestamp="2026-10-01T10:00:00Z",
            source="agent",
            message="I ask for help.",
            tool_calls=[call],
            observation=Observation(results=[answer]),
            metrics=tokens,
            llm_call_count=1,
        ),
    ],
    final_metrics=FinalMetrics(total_steps=2),
    subagent_trajectories=[helper],
)
Path(sys.argv[1]).write_text(format_trajectory_json(trajectory.to_json_dict()))
