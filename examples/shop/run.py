"""The demo's acts: warm start, serving, exam, training, exam. Used by `demo` and `controls`."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import openai

from tracegrad import flush, intake
from tracegrad.store import TurnCounts

from . import chart, drive, tasks
from .chart import Exam
from .screen import Phase, Screen
from .stage import Stage, served

STEPS = 32
GROUPS = 16
SAMPLES = 8
# Groups without signal make no step; an agent that is always right would work for ever.
GROUPS_AT_MOST = 3 * GROUPS  # a step

SERVE: Mapping[str, object] = {
    "ranks": 2,
    "data.tags": '{"split": "train"}',
    "batches.groups": GROUPS,
    "batches.group_size": SAMPLES,
    "batches.tokens_per_micro_batch": 2048,
    # The agent waits before more than three batches are under way, so that no turn gets too old.
    "batches.stale": "wait",
    "batches.max_staleness": 2,
    "objective.preset": "grpo",
    "optim.lr": 5e-4,
    "fsdp.reshard": "false",
    "fsdp.threads": 1,
    "vllm.max_model_len": 512,
    "vllm.kv_cache_memory_bytes": 128 << 20,
}


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
    exam_split: tasks.Split = "held_out"
    exam_tasks: int = 200


@dataclass(frozen=True, kw_only=True)
class Result:
    before: Exam
    after: Exam
    policy_versions: int
    counts: TurnCounts
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
        }


def plan_steps(plan: Plan) -> int:
    return STEPS if plan.steps is None else plan.steps


def run(plan: Plan, screen: Screen) -> Result:
    """The whole play. Raises ChildError when a process of the stack does not come or stay."""
    model = warm_up(plan, screen)
    with serving(plan, model, screen) as stage:
        try:
            return asyncio.run(play(plan, stage, screen))
        except openai.OpenAIError:
            stage.explain()
            raise


def warm_up(plan: Plan, screen: Screen) -> Path:
    from .warm_start import Recipe, warm_start

    recipe = Recipe(seed=plan.model_seed)
    with screen.phase("warm start", recipe.steps) as phase:
        folder = warm_start(
            plan.root, recipe, lambda done, _, loss: phase.update(done, f"loss {loss:.2f}")
        )
        if not phase.note:
            phase.note = "kept from an earlier run"
    return folder


@contextmanager
def serving(plan: Plan, model: Path, screen: Screen) -> Iterator[Stage]:
    overrides = dict(SERVE) | {
        "seed": plan.seed,
        "optim.schedule": "linear",
        "optim.decay_steps": max(1, plan_steps(plan)),
    }
    if plan.learning_rate is not None:
        overrides["optim.lr"] = plan.learning_rate
    phase_of = screen.phase("start vLLM, proxy and two FSDP ranks")
    phase = phase_of.__enter__()
    with served(
        plan.port, model, plan.state_dir, overrides, lambda note: phase.update(note=note)
    ) as stage:
        phase.note = stage.url
        phase_of.__exit__(None, None, None)
        yield stage


async def play(plan: Plan, stage: Stage, screen: Screen) -> Result:
    before = await examine(f"{named(plan)} tasks, before", plan, stage, screen)
    await learn(plan, stage, screen)
    after = await examine(f"{named(plan)} tasks, after", plan, stage, screen)
    flush()
    steps = stage.steps()
    seconds: Counter[str] = Counter()
    for step in steps:
        seconds.update(step.metrics["seconds"])
    points = stage.store.reward_curve({"split": "train"})
    picture = chart.draw(
        plan.state_dir / "learning_curve.png",
        [(point.version or 0, point.reward) for point in points],
        before,
        after,
        title="The shop's agent, trained while it runs",
        split=named(plan),
    )
    return Result(
        before=before,
        after=after,
        policy_versions=stage.version,
        counts=stage.turn_counts(),
        seconds=dict(seconds),
        gap_max=max((step.metrics["gap_max"] for step in steps), default=0.0),
        picture=picture,
    )


def named(plan: Plan) -> str:
    return plan.exam_split.replace("_", "-")


async def examine(name: str, plan: Plan, stage: Stage, screen: Screen) -> Exam:
    """Held-out success, greedy and at temperature 1."""
    exam = tasks.exam(plan.exam_split, plan.exam_tasks)
    version = stage.version
    scores: dict[str, drive.Score] = {}
    with screen.phase(name, 2 * len(exam)) as phase:
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):

            def show(score: drive.Score, kind: str = kind) -> None:
                stage.check()
                scores[kind] = score
                note = "  ".join(f"{k} {s.rate:.2f}" for k, s in scores.items())
                phase.update(sum(s.rollouts for s in scores.values()), note)

            scores[kind] = await drive.evaluate(
                exam, temperature, plan.exam_split, progress=show, tags={"exam": kind}
            )
    return Exam(version, scores["greedy"], scores["sampled"])


async def learn(plan: Plan, stage: Stage, screen: Screen) -> None:
    """Sends training tasks to the agent until the trainer has made its steps and is idle."""
    steps = plan_steps(plan)
    if not steps:
        return
    recent: deque[float] = deque(maxlen=GROUPS * SAMPLES)

    def until_trained() -> Iterator[tasks.Task]:
        for task in islice(tasks.train_tasks(plan.seed), steps * GROUPS_AT_MOST):
            if stage.last_step >= steps:
                return
            yield task

    async def permit() -> None:
        while stage.last_step < steps:
            stage.check()
            with suppress(TimeoutError):
                await intake(SAMPLES, timeout_s=1.0)
                return

    with screen.phase("training, while the agent works", steps) as phase:
        groups = drive.train(
            until_trained(),
            samples=SAMPLES,
            permit=permit,
            shuffle_rewards=plan.seed if plan.shuffle_rewards else None,
        )
        async for group in groups:
            stage.check()
            recent.extend(group.successes)
            show_step(phase, stage, sum(recent) / len(recent))
        await settle(stage)
        show_step(phase, stage, sum(recent) / len(recent))


def show_step(phase: Phase, stage: Stage, success: float) -> None:
    steps = stage.steps()
    last = steps[-1] if steps else None
    note = f"success {success:.2f}  version {stage.version}  {stage.doing()}"
    if last:
        total = sum(last.metrics["seconds"].values())
        where = ", ".join(
            f"{name} {seconds / total:.0%}"
            for name, seconds in sorted(last.metrics["seconds"].items(), key=lambda x: -x[1])
            if seconds / total >= 0.02
        )
        note += f"  {total:.1f} s a step: {where}"
    phase.update(last.step if last else 0, note)


async def settle(stage: Stage, quiet_s: float = 1.5) -> None:
    """Until the trainer has been waiting for `quiet_s`: no weights change after this."""
    flush()
    quiet = 0.0
    while quiet < quiet_s:
        stage.check()
        await asyncio.sleep(0.1)
        quiet = quiet + 0.1 if stage.doing() == "waiting" else 0.0
