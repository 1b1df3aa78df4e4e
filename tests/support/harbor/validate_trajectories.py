"""Run by Harbor's Python: each line of standard input as Harbor's own model of a trajectory."""

from __future__ import annotations

import json
import sys

from harbor.models.trajectories import Trajectory

for line in sys.stdin:
    trajectory = Trajectory.model_validate_json(line)
    # What Harbor would write again is what was written.
    assert trajectory.to_json_dict() == json.loads(line), "it is not kept whole"
    print(trajectory.trajectory_id, len(trajectory.steps))
