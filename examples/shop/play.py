"""One play from warm start to last exam: what an example has to bring, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tracegrad import flush
from tracegrad.store import TurnCounts
from tracegrad.store.types import AgentTurns

from . import acts, chart
from .chart import Exam
from .rollouts import Attempt
from .screen import Screen
from .stage import Stage
from .tasks import Split


@dataclass(frozen=True, kw_only=True)
class Plan:
    port: int  # of the proxy
    root: Path  # where warm-started models are kept
    state_dir: Path  # of this run
    seed: int = 0  # of training tasks, of shuffling, of the trainer
    model_seed: int = 0  # of the warm start
    steps: int | None = None
    learning_rate: float | None = None
    shuffle_rewards: bool = False
    exam_split: Split = "held_out"
    exam_tasks: int = 200

    @property
    def split_name(self) -> str:
        return self.exam_split.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Play:
    """An example: its agent, its tasks, its model.

    Attributes:
        title: of the picture.
        settings: of `trainer serve`.
        steps: optimizer steps, unless the plan says otherwise.
        groups, samples: a step takes so many groups of so many rollouts.
        warm_up: makes the model's directory.
        attempts: how the agent attempts a task; called once a run.
        exam: the first tasks of a split, always the same.
        train_tasks: of a seed, without end.
    """

    title: str
    settings: Mapping[str, object]
    steps: int
    groups: int
    samples: int
    warm_up: Callable[[Plan, Screen], Path]
    attempts: Callable[[Plan], Attempt]
    exam: Callable[[Split, int], Sequence[Any]]
    train_tasks: Callable[[int], Iterator[Any]]

    def steps_of(self, plan: Plan) -> int:
        return self.steps if plan.steps is None else plan.steps

    def settings_of(self, plan: Plan) -> dict[str, object]:
        settings = {
            **self.settings,
            "batches.groups": self.groups,
            "batches.group_size": self.samples,
            "seed": plan.seed,
            "optim.schedule": "linear",
            "optim.decay_steps": max(1, self.steps_of(plan)),
        }
        if plan.learning_rate is not None:
            settings["optim.lr"] = plan.learning_rate
        return settings


@dataclass(frozen=True, kw_only=True)
class Result:
    before: Exam
    after: Exam
    policy_versions: int
    counts: TurnCounts
    by_agent: Mapping[str, AgentTurns]  # of agents that their calls name
    seconds: dict[str, float]  # of the trainer, by stage
    gap_max: float  # |log-prob gap| of the two engines on on-policy tokens, over all steps
    picture: Path

    def summary(self) -> dict[str, float]:
        return {
            "success_before": self.before.greedy.rate,
            "success_after": self.after.greedy.rate,
            "sampled_before": self.before.sampled.rate,
            "sampled_after": self.after.sampled.rate,
            "policy_versions": self.policy_versions,
            "turns_captured": self.counts.captured,
            "turns_trained": self.counts.trained,
            **{f"turns_trained_{name}": turns.trained for name, turns in self.by_agent.items()},
        }


def run(play: Play, plan: Plan, screen: Screen) -> Result:
    """All of it. Raises ChildError when a process of the stack does not come or stay."""
    model = play.warm_up(plan, screen)
    settings = play.settings_of(plan)
    with acts.serving(plan.port, model, plan.state_dir, settings, screen) as stage:
        try:
            return asyncio.run(_on_stage(play, plan, stage, screen))
        except openai.OpenAIError:
            stage.explain()
            raise


async def _on_stage(play: Play, plan: Plan, stage: Stage, screen: Screen) -> Result:
    exam, attempt = play.exam(plan.exam_split, plan.exam_tasks), play.attempts(plan)
    before = await acts.examine(f"{plan.split_name} tasks, before", attempt, exam, stage, screen)
    await learn(play, plan, attempt, stage, screen)
    after = await acts.examine(f"{plan.split_name} tasks, after", attempt, exam, stage, screen)
    flush()
    points = stage.store.reward_curve({"split": "train"})
    picture = chart.draw(
        plan.state_dir / "learning_curve.png",
        [(point.version or 0, point.reward) for point in points],
        before,
        after,
        title=play.title,
        split=plan.split_name,
    )
    return Result(
        before=before,
        after=after,
        policy_versions=stage.version,
        counts=stage.turn_counts(),
        by_agent=stage.store.turns_by_agent(),
        seconds=acts.trainer_seconds(stage),
        gap_max=acts.largest_gap(stage),
        picture=picture,
    )


async def learn(play: Play, plan: Plan, attempt: Attempt, stage: Stage, screen: Screen) -> None:
    """Sends training tasks to the agent until the trainer has made its steps and is idle."""
    await acts.learn(
        attempt,
        play.train_tasks(plan.seed),
        stage,
        screen,
        steps=play.steps_of(plan),
        groups=play.groups,
        samples=play.samples,
        shuffle_rewards=plan.seed if plan.shuffle_rewards else None,
    )
