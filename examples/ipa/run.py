"""One run: rounds of sampling from anchors, and an optimizer step on what was sampled."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tracegrad_trainer.anchors import AnchorSettings, Schedule
from tracegrad_trainer.coordinator import Supply
from tracegrad_trainer.fsdp import full_tensors
from tracegrad_trainer.settings import TrainerSettings
from tracegrad_trainer.training import Training

from .sampling import Attempt, Policy, play
from .vault import NAMES, expert
from .warm_start import warm_start

Method = Literal["rollback", "parallel", "grpo"]

GROUP = 8  # rollouts that are compared with each other
# Of a group. Their first turn is a call at random, whose probability is what is recorded (mu): a
# policy that made up its mind too early, as small ones do, still meets the right call.
EXPLORING = GROUP // 2
# What was chosen for what the paper leaves open; docs/ipa.md says why.
IPA: dict[str, Any] = {
    "preset": "ipa",
    "gamma": 0.9,
    "correction_cap": 2.0,
    "imitation": 0.0,
    "reinforcement": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`grpo` samples every task from its beginning; the others by anchors, with preset `ipa`."""

    method: Method
    folder: Path
    seed: int = 0
    rounds: int = 90
    rollouts: int = 2 * GROUP  # of each vault in a round
    vaults: int = len(NAMES)
    turns: int = 5
    lr: float = 3e-3
    shuffled: bool = False  # rewards permuted within their groups: a control
    objective: tuple[tuple[str, Any], ...] = ()  # changes of it
    exam_every: int = 5
    exam: int = 32  # rollouts of each vault from its beginning


@dataclass(frozen=True, slots=True)
class Point:
    """After `rounds`: success from the beginning of the tasks, and where their anchors stood."""

    rounds: int
    success: float
    anchor: float


@dataclass(frozen=True, slots=True)
class Curve:
    points: tuple[Point, ...]
    steps: int  # optimizer steps
    turns: int  # of the policy's

    @property
    def first(self) -> float:
        return self.points[0].success

    @property
    def last(self) -> float:
        return self.points[-1].success


def run(plan: Plan) -> Curve:
    """Trains in `plan.folder`, which holds model, store and checkpoints afterwards."""
    model = warm_start(plan.folder / "model", seed=plan.seed)
    with ExitStack() as stack:
        return _Run(plan, settings_of(plan, model), stack).all()


def settings_of(plan: Plan, model: Path) -> TrainerSettings:
    objective: dict[str, Any] = {"preset": "grpo"} if plan.method == "grpo" else IPA
    values = {
        "model": model,
        "state_dir": plan.folder,
        "seed": plan.seed,
        "batches": {
            "groups": plan.vaults * plan.rollouts // GROUP,
            "group_size": GROUP,
            "tokens_per_micro_batch": 4096,
            "max_staleness": None,  # what was called at random is of no version
        },
        "objective": objective | dict(plan.objective),
        "optim": {"lr": plan.lr},
        "checkpoint": {"keep": 1},
        "fsdp": {"device": "cpu", "threads": 1, "reshard": False},
    }
    return TrainerSettings.model_validate(values)


class _Run:
    def __init__(self, plan: Plan, settings: TrainerSettings, stack: ExitStack) -> None:
        self.plan = plan
        # What is ready is all there is: nobody else brings rollouts.
        self.training = Training(
            settings, stack, stopping=lambda: False, supply=Supply(grows=False)
        )
        self.training.resume()
        self.policy = Policy(settings.model, plan.seed)
        self.experts = [expert(name, plan.turns) for name in NAMES[: plan.vaults]]
        self.schedule = _schedule(plan)
        for each in self.experts:
            self.schedule.add(each.vault, len(each.calls))
        self.rng = random.Random(f"shuffle {plan.seed}")
        self.turns = 0

    def all(self) -> Curve:
        points = [self._point(0)]
        for number in range(1, self.plan.rounds + 1):
            self._round()
            if number % self.plan.exam_every == 0:
                points.append(self._point(number))
        self.training.settle()
        return Curve(tuple(points), self.training.step, self.turns)

    def _round(self) -> None:
        attempts = [
            Attempt(
                each,
                anchor,
                self.training.version,
                {"split": "train"},
                explores=number % GROUP < EXPLORING,
            )
            for each in self.experts
            for anchor, count in self._quotas(each.vault).items()
            for number in range(count)
        ]
        play(self.policy, attempts)
        self.turns += sum(len(attempt.turns) - attempt.anchor for attempt in attempts)
        self._tell(attempts)
        rewards = self._rewards(attempts)
        told = zip(attempts, rewards, strict=True)
        store = self.training.store
        assert store is not None
        store.append([fact for attempt, reward in told for fact in attempt.facts(reward)])
        # One optimizer step and the push of its weights, if there is anything to learn from.
        if self.training.next() == "train" and self.training.train():
            self.policy.load(full_tensors(self.training.learner.model))

    def _quotas(self, vault: str) -> dict[int, int]:
        """Rollouts by anchor."""
        if self.plan.method == "grpo":
            return {0: self.plan.rollouts}
        # Whole groups: rollouts of one anchor are compared with each other.
        planned = self.schedule.plan(vault, self.plan.rollouts // GROUP)
        return {anchor: groups * GROUP for anchor, groups in planned.items()}

    def _tell(self, attempts: Sequence[Attempt]) -> None:
        """The schedule hears how the policy itself did, not what the control makes of it."""
        if self.plan.method == "grpo":
            return
        found: dict[tuple[str, int], list[bool]] = defaultdict(list)
        for attempt in attempts:
            if attempt.failure is None and not attempt.explores:
                found[attempt.expert.vault, attempt.anchor].append(attempt.vault.opened)
        for (vault, anchor), successes in found.items():
            self.schedule.observe(vault, anchor, successes)

    def _rewards(self, attempts: Sequence[Attempt]) -> list[float]:
        rewards = [float(attempt.vault.opened) for attempt in attempts]
        if self.plan.shuffled:
            for start in range(0, len(rewards), GROUP):
                group = rewards[start : start + GROUP]
                rewards[start : start + GROUP] = self.rng.sample(group, len(group))
        return rewards

    def _point(self, rounds: int) -> Point:
        exam = [
            Attempt(each, 0, self.training.version, {})
            for each in self.experts
            for _ in range(self.plan.exam)
        ]
        play(self.policy, exam)
        anchors = [state.at for state in self.schedule.tasks.values()]
        success = sum(attempt.vault.opened for attempt in exam) / len(exam)
        return Point(rounds, success, sum(anchors) / len(anchors))


def _schedule(plan: Plan) -> Schedule:
    mode: Literal["rollback", "parallel"] = "parallel" if plan.method == "parallel" else "rollback"
    return Schedule(
        AnchorSettings(mode=mode, threshold=0.9, window=2 * GROUP, review=0.5, seed=plan.seed)
    )
