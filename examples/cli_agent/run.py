"""One run: `trainer serve` comes up, mini-swe-agent works on training tasks while it learns, and is
examined on tasks that nobody trains on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from examples.shop import acts
from examples.shop.rollouts import Score
from examples.shop.screen import Phase, Screen
from examples.shop.stage import Stage

from tracegrad.runner.attempt import Attempt
from tracegrad.runner.driver import RunObserver
from tracegrad.runner.scheduler import Ticket

from . import tasks
from .sandboxes import Sandboxes, Unusable, Work

SAMPLES = 4
# After so many attempts of which none was scored something else is wrong than bad luck.
HOPELESS = 6
SERVE: Mapping[str, object] = {
    "ranks": 1,
    "data.tags": '{"split": "train"}',
    "batches.group_size": SAMPLES,
    "batches.tokens_per_micro_batch": 2048,
    # A minute of CPU lies in a batch, and a second in a step: nothing is sampled ahead of one.
    "batches.stale": "wait",
    "batches.max_staleness": 0,
    "objective.preset": "grpo",
    # Adam's first steps move every weight by the whole rate, whatever its gradient: at 1e-3 one
    # step of one seed unlearnt the format.
    "optim.lr": 4e-4,
    "optim.warmup_steps": 2,
    "fsdp.reshard": "false",
    "fsdp.threads": 1,
    "vllm.max_model_len": 512,
    "vllm.kv_cache_memory_bytes": 128 << 20,
}

OpenSandboxes = Callable[[Path], AbstractAsyncContextManager[Sandboxes]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`coin`: rewards that say nothing, a control. `examine_first`: also before training."""

    port: int
    state_dir: Path
    steps: int
    groups: int  # of SAMPLES attempts: what a step takes
    held_out: int  # tasks of an exam
    seed: int = 0
    learning_rate: float | None = None
    coin: bool = False
    examine_first: bool = True


@dataclass(frozen=True, kw_only=True)
class Result:
    before: Score | None
    after: Score
    versions: int
    turns_trained: int
    rollouts: int
    not_scored: int  # that failed by no doing of the agent, and were made again


def run(plan: Plan, model: Path, sandboxes: OpenSandboxes, screen: Screen) -> Result:
    """Raises ChildError when a process of the stack does not come or stay, and Unusable."""
    settings = dict(SERVE) | {"seed": plan.seed, "batches.groups": plan.groups}
    if plan.learning_rate is not None:
        settings["optim.lr"] = plan.learning_rate
    with acts.serving(plan.port, model, plan.state_dir, settings, screen) as stage:
        return asyncio.run(_Run(plan, stage, screen).all(sandboxes))


class _Run(RunObserver):
    def __init__(self, plan: Plan, stage: Stage, screen: Screen) -> None:
        self._plan, self._stage, self._screen = plan, stage, screen
        self._rollouts = self._not_scored = 0
        self._told: Callable[[Attempt], None] = lambda _: None

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self._stage.check()
        self._rollouts += 1
        self._not_scored += not attempt.outcome.scored
        if self._not_scored == self._rollouts == HOPELESS:
            raise Unusable(f"no attempt comes to its end: {attempt.reason}")
        self._told(attempt)

    async def all(self, sandboxes: OpenSandboxes) -> Result:
        async with sandboxes(self._plan.state_dir) as places:
            before = None
            if self._plan.examine_first:
                # Every other exam is compared with it.
                before = await self._examine("held-out tasks, before", places, times=2)
            await self._learn(places)
            after = await self._examine("held-out tasks, after", places)
        return Result(
            before=before,
            after=after,
            versions=self._stage.version,
            turns_trained=self._stage.turn_counts().trained,
            rollouts=self._rollouts,
            not_scored=self._not_scored,
        )

    async def _examine(self, name: str, places: Sandboxes, *, times: int = 1) -> Score:
        """Each task so many times."""
        asked, score = tasks.held_out(self._plan.held_out), Score(0, 0)
        with self._screen.phase(name, times * len(asked)) as phase:

            def told(attempt: Attempt) -> None:
                nonlocal score
                if attempt.reward is not None:
                    score = Score(score.successes + int(attempt.reward), score.rollouts + 1)
                    phase.update(score.rollouts, f"success {score.rate:.2f}")

            self._told = told
            logs = self._plan.state_dir / "attempts"
            await places.attempt(
                asked, Work(split="held_out", attempts=times), logs=logs, observer=self
            )
        return score

    async def _learn(self, places: Sandboxes) -> None:
        if not self._plan.steps:
            return
        recent: deque[float] = deque(maxlen=2 * self._plan.groups * SAMPLES)
        with self._screen.phase("training, while the agent works", self._plan.steps) as phase:

            def told(attempt: Attempt) -> None:
                recent.extend([] if attempt.reward is None else [attempt.reward])
                self._show(phase, recent)

            self._told = told
            work = Work(split="train", attempts=SAMPLES, coin=self._plan.coin)
            # Groups without signal make no step; an agent that is always right would work for ever.
            # Of few groups, several may have none by chance.
            most = max(self._plan.steps * self._plan.groups, 8) * acts.GROUPS_AT_MOST
            await places.attempt(
                islice(tasks.train_tasks(self._plan.seed), most),
                work,
                logs=self._plan.state_dir / "attempts",
                observer=self,
                enough=lambda: self._stage.last_step >= self._plan.steps,
            )
            await acts.settle(self._stage)
            self._show(phase, recent)

    def _show(self, phase: Phase, recent: deque[float]) -> None:
        acts.show_step(phase, self._stage, sum(recent) / max(1, len(recent)))
