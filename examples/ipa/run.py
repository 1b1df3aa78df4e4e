"""One run: rounds of sampling from anchors, and an optimizer step on what was sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tracegrad.store.anchors.anchor_store import AnchorStore, RolloutFromAnchor
from tracegrad.store.anchors.schedule import AnchorSettings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import full_tensors
from tracegrad_trainer.rl.coordinator import RolloutSupply
from tracegrad_trainer.rl.train_loop import TrainLoop

from .sampling import Attempt, Policy, play
from .vault import NAMES, expert
from .warm_start import warm_start

Method = Literal["rollback", "parallel", "grpo"]

GROUP = 8  # rollouts that are compared with each other
# Of a group. Their first turn is a call at random, whose probability is what is recorded (mu): a
# policy that made up its mind too early, as small ones do, still meets the right call.
EXPLORING = GROUP // 2
TAGS = {"split": "train"}
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
    failing: bool = False  # every reward is 0: what is learnt comes of imitation alone
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
        return Run(plan, settings_of(plan, model), stack).all()


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


class Run:
    def __init__(self, plan: Plan, settings: TrainerSettings, stack: ExitStack) -> None:
        self.plan = plan
        # What is ready is all there is: nobody else brings rollouts.
        self.training = TrainLoop(
            settings, stack, stopping=lambda: False, supply=RolloutSupply(is_open=False)
        )
        self.training.resume()
        self.policy = Policy(settings.model, plan.seed)
        self.experts = [expert(name, plan.turns) for name in NAMES[: plan.vaults]]
        assert self.training.store is not None
        self.store = self.training.store
        self.anchors = None if plan.method == "grpo" else AnchorStore(self.store, _anchors(plan))
        if self.anchors is not None:  # what the experts did, as rollouts like any other
            shown = [Attempt(each, len(each.calls), -1, {}) for each in self.experts]
            self.store.append([event for one in shown for event in one.events(reward=1.0)])
        self.rng = random.Random(f"shuffle {plan.seed}")
        self.turns = 0

    def all(self) -> Curve:
        points = [self._point(0)]
        for number in range(1, self.plan.rounds + 1):
            self._round()
            if number % self.plan.exam_every == 0:
                points.append(self._point(number))
        self.training.commit_pending()
        return Curve(tuple(points), self.training.step, self.turns)

    def _round(self) -> None:
        attempts = [
            Attempt(
                each,
                0 if opened is None else opened.anchor,
                self.training.version,
                TAGS,
                explores=number % GROUP < EXPLORING,
                opened=opened,
            )
            for each in self.experts
            for number, opened in enumerate(self._opened(each.vault))
        ]
        play(self.policy, attempts)
        self.turns += sum(len(attempt.turns) - attempt.anchor for attempt in attempts)
        rewarded = zip(attempts, self._rewards(attempts), strict=True)
        self.store.append([event for one, reward in rewarded for event in one.events(reward)])
        # One optimizer step and the push of its weights, if there is anything to learn from.
        if self.training.next_action() == "train" and self.training.train_batch():
            self.policy.load(full_tensors(self.training.learner.model))

    def _opened(self, vault: str) -> list[RolloutFromAnchor | None]:
        """The vault's next rollouts; None: one from its beginning. A call at random says nothing
        of the policy, so those that explore do not count."""
        if self.anchors is None:
            return [None] * self.plan.rollouts
        found: list[RolloutFromAnchor | None] = []
        for _ in range(self.plan.rollouts // GROUP):
            for count, counts in ((EXPLORING, False), (GROUP - EXPLORING, True)):
                found += self.anchors.next(
                    vault, count=count, counts=counts, agent="vaults", tags=TAGS
                )
        return found

    def _rewards(self, attempts: Sequence[Attempt]) -> list[float]:
        if self.plan.failing:
            return [0.0] * len(attempts)
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
        success = sum(attempt.vault.opened for attempt in exam) / len(exam)
        return Point(rounds, success, self._anchor())

    def _anchor(self) -> float:
        """Where the vaults' anchors stand, the mean; at the expert's last turn before the first
        rollout, and at 0 where there are none."""
        if self.anchors is None:
            return 0.0
        standing = [self.anchors.task_state(each.vault).anchors for each in self.experts]
        last = self.plan.turns - 1
        return sum(last if each is None else each.at for each in standing) / len(standing)


def _anchors(plan: Plan) -> AnchorSettings:
    return AnchorSettings(
        mode="parallel" if plan.method == "parallel" else "rollback",
        threshold=0.9,
        window=2 * GROUP,
        group_size=GROUP,
        groups=plan.rollouts // GROUP,
        review=0.5,
        seed=plan.seed,
    )
