from typing import Any

from polar.trajectory.evaluator.base import BaseTrajectoryEvaluator
from polar.trajectory.models import EvalResult, Trajectory
from warehouse import reward


class Expected(BaseTrajectoryEvaluator):
    def __init__(self, *, expected: str) -> None:
        self.expected = expected

    async def evaluate(self, trajectory: Trajectory, **_: Any) -> EvalResult:
        messages = trajectory.traces[-1].response_messages if trajectory.traces else []
        said = messages[-1].get("content") if messages else None
        return EvalResult(outcome_reward=reward(said, self.expected))
