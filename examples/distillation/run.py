"""The acts: a student as it begins, a teacher recorded, imitation of it, then its own rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from examples.shop import acts, drive, play, tasks
from examples.shop.chart import Exam
from examples.shop.run import PLAY
from examples.shop.screen import Screen
from examples.shop.warm_start import Recipe, warm_start

from tracegrad_trainer.utils.stopwatch import Stopwatch

from .imitate import Imitation, imitate
from .record import Recording, record


@dataclass(frozen=True, kw_only=True)
class Form:
    """How much of each stage there is."""

    recipe: Recipe  # of the student as it begins
    traces: int  # tasks that the teacher is asked
    epochs: int = 3  # of imitation
    play: play.Play  # learning from rewards
    exam_tasks: int


LONG = Form(recipe=Recipe(), traces=64, play=replace(PLAY, steps=20), exam_tasks=120)
# The student is made in a third of the time. Exams are too short to say how far it rises.
SHORT = Form(
    recipe=Recipe(hidden=64, layers=3, steps=400, learning_rate=4e-3),
    traces=32,
    play=replace(PLAY, steps=4, groups=8),
    exam_tasks=30,
)


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
            "teacher": round(self.recording.score.rate, 3),
            "traces": self.recording.score.rollouts,
            "sft_steps": self.imitation.steps,
            "sft_losses": [round(loss, 3) for loss in self.imitation.losses],
            "policy_versions": self.policy_versions,
        }


def run(form: Form, plan: play.Plan, screen: Screen, loop: asyncio.Runner) -> Result:
    """All of it. `loop`: one for all acts, for the agent's client keeps its connections.
    Raises ChildError when a process does not come or stay."""
    watch = Stopwatch()
    recipe = form.recipe
    model = screen.warm_start(recipe.steps, lambda seen: warm_start(plan.root, recipe, seen))
    exam = tasks.exam(plan.exam_split, form.exam_tasks)
    settings = form.play.settings_of(plan)
    with acts.serving(plan.port, model, plan.state_dir / "before", settings, screen) as stage:
        begun = loop.run(acts.examine("held-out tasks, before", drive.attempt, exam, stage, screen))
    stages = [Stage("as it begins", begun, "careless demonstrations", _lap(watch))]

    folder = plan.state_dir / "teacher"
    recording = loop.run(record(plan.port, folder, plan.seed, form.traces, screen))
    folder = plan.state_dir / "sft"
    imitation = imitate(model, recording, folder, screen, epochs=form.epochs)

    served = acts.serving(plan.port, imitation.model, plan.state_dir / "rl", settings, screen)
    with served as stage:
        name = "held-out tasks, after SFT"
        imitated = loop.run(acts.examine(name, drive.attempt, exam, stage, screen))
        score = recording.score
        right = f"{score.successes} of the teacher's {score.rollouts} traces"
        stages.append(Stage("trainer sft", imitated, right, _lap(watch)))
        loop.run(play.learn(form.play, plan, drive.attempt, stage, screen))
        name = "held-out tasks, after RL"
        rewarded = loop.run(acts.examine(name, drive.attempt, exam, stage, screen))
        trained = f"rewards of {stage.turn_counts().trained} turns of its own"
        stages.append(Stage("trainer serve", rewarded, trained, _lap(watch)))
        return Result(
            stages=stages,
            recording=recording,
            imitation=imitation,
            policy_versions=stage.version,
        )


def _lap(watch: Stopwatch) -> float:
    """Seconds since the last one."""
    watch.lap("stage")
    return watch.take()["stage"]
