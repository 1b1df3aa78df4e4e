"""Run by OpenEnv's Python: each training trace of standard input, as the session of a harness gives
it, becomes the rows that TRL's asynchronous GRPO trains on.

The argument is the folder of our packages, which has TRL. They come behind OpenEnv's: the other way
round it would find an mcp that its fastmcp cannot use.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

sys.path.append(sys.argv[1])

from openenv.core.harness import TrainingTrace, VerifyResult
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker


@dataclass(eq=False)  # TRL keeps sessions in a set
class Recorded:
    """A session whose agent has ended."""

    trace: TrainingTrace

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        return 0

    def fetch_training_trace(self) -> TrainingTrace:
        return self.trace

    def verify(self, transcript: list[Any], final_state: Any = None) -> VerifyResult:
        return VerifyResult(env_reward=self.trace.turns[0].metadata.get("reward"))

    def close(self) -> None:
        pass


class Sessions:
    """A task is its trace."""

    def __init__(self, sampling: dict[str, Any]) -> None:
        self.sampling = sampling

    def create(self, task: TrainingTrace, *, seed: int, episode_id: str) -> Recorded:
        return Recorded(task)


# What it would sample and score with: a recorded session asks for none of it.
UNUSED = dict.fromkeys(
    (
        "rollout_buffer",
        "model_version_value",
        "heartbeat_value",
        "failed_event",
        "exception_info_queue",
        "metrics_queue",
    )
)
loop = HarnessRolloutWorker._loop_cls(
    harness_session_factory=Sessions,
    model_name="policy",
    dataset=[],
    reward_funcs=[],
    processing_class=SimpleNamespace(response_template=""),
    eos_token_ids=[],
    **UNUSED,
)
for line in sys.stdin:
    task = TrainingTrace.model_validate_json(line)
    (completion, ids, rows, calls, failures, reward), metrics = loop._run_session(task)
    assert metrics is not None, "TRL took the rollout for one without a result"
    made = {
        "rows": [asdict(row) for row in rows],
        "completion": completion,
        "sampled": ids,
        "tool_calls": calls,
        "tool_failures": failures,
        "reward": reward,
    }
    print(json.dumps(made))
