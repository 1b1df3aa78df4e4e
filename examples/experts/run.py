"""The acts: a student as it begins, an expert recorded, imitation of it, then its own rewards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.shop import acts, drive, tasks
from examples.shop.chart import Exam
from examples.shop.run import SERVE
from examples.shop.screen import Screen
from examples.shop.warm_start import Recipe, warm_start

from .imitate import Imitation, imitate
from .record import Recording, record

SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    port: int  # of the proxy: of one after the other
    root: Path  # where warm-started models are kept
    state_dir: Path
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    traces: int = 64  # tasks that the expert is asked
    epochs: int = 3
    steps: int = 20  # of reinforcement learning
    groups: int = 16
    learning_rate: float = 5e-4
    exam_tasks: int = 120


# The student is made in a third of the time. Exams are too short to say how far it rises.
SHORT: Mapping[str, object] = {
    "recipe": Recipe(hidden=64, layers=3, steps=400, learning_rate=4e-3),
    "traces": 32,
    "steps": 4,
    "groups": 8,
    "exam_tasks": 30,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """What the student can do after it, and what it was given."""

    name: str
    exam: Exam
    learnt_from: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Result:
    stages: Sequence[Stage]  # as it begins, after imitation, after its own rewards
    recording: Recording
    imitation: Imitation
    policy_versions: int

    def summary(self) -> dict[str, object]:
        begun, imitated, rewarded = (stage.exam for stage in self.stages)
        return {
            "success_before": begun.greedy.rate,
            "success_sft": imitated.greedy.rate,
            "success_after": rewarded.greedy.rate,
            "sampled_before": begun.sampled.rate,
            "sampled_sft": imitated.sampled.rate,
            "sampled_after": rewarded.sampled.rate,
            "expert": round(self.recording.score.rate, 3),
            "traces": self.recording.score.rollouts,
            "sft_steps": self.imitation.steps,
            "sft_losses": [round(loss, 3) for loss in self.imitation.losses],
            "policy_versions": self.policy_versions,
        }


def run(plan: Plan, screen: Screen, loop: asyncio.Runner) -> Result:
    """All of it. `loop`: one for all acts, for the agent's client keeps its connections.
    Raises ChildError when a process does not come or stay."""
    clock = _Clock()
    model = screen.warm_start(
        plan.recipe.steps, lambda seen: warm_start(plan.root, plan.recipe, seen)
    )
    exam = tasks.exam("held_out", plan.exam_tasks)
    settings = settings_of(plan)
    with acts.serving(plan.port, model, plan.state_dir / "before", settings, screen) as stage:
        begun = loop.run(acts.examine("held-out tasks, before", drive.attempt, exam, stage, screen))
    stages = [Stage("as it begins", begun, "careless demonstrations", clock.lap())]

    folder = plan.state_dir / "expert"
    recording = loop.run(record(plan.port, folder, plan.seed, plan.traces, screen))
    folder = plan.state_dir / "sft"
    imitation = imitate(model, recording, folder, screen, epochs=plan.epochs)

    served = acts.serving(plan.port, imitation.model, plan.state_dir / "rl", settings, screen)
    with served as stage:
        name = "held-out tasks, after SFT"
        imitated = loop.run(acts.examine(name, drive.attempt, exam, stage, screen))
        score = recording.score
        right = f"{score.successes} of the expert's {score.rollouts} traces"
        stages.append(Stage("trainer sft", imitated, right, clock.lap()))
        loop.run(
            acts.learn(
                drive.attempt,
                tasks.train_tasks(plan.seed),
                stage,
                screen,
                steps=plan.steps,
                groups=plan.groups,
                samples=SAMPLES,
            )
        )
        name = "held-out tasks, after RL"
        rewarded = loop.run(acts.examine(name, drive.attempt, exam, stage, screen))
        trained = f"rewards of {stage.turn_counts().trained} turns of its own"
        stages.append(Stage("trainer serve", rewarded, trained, clock.lap()))
        return Result(
            stages=stages,
            recording=recording,
            imitation=imitation,
            policy_versions=stage.version,
        )


def settings_of(plan: Plan) -> dict[str, object]:
    """Of `trainer serve`."""
    return {
        **SERVE,
        "batches.groups": plan.groups,
        "batches.group_size": SAMPLES,
        "seed": plan.seed,
        "optim.lr": plan.learning_rate,
        "optim.schedule": "linear",
        "optim.decay_steps": plan.steps,
    }


class _Clock:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last one."""
        now, before = time.monotonic(), self._last
        self._last = now
        return now - before
