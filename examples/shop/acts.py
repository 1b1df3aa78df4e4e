"""The acts of a play in which an agent is trained while it works, the shop's or another example's:
`trainer serve` comes up, held-out tasks are examined, training tasks are worked on."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from tracegrad import flush, intake

from . import rollouts
from .chart import Exam
from .rollouts import Attempt, Score, Task
from .screen import Phase, Screen
from .stage import Stage, served

# Groups without signal make no step; an agent that is always right would work for ever.
GROUPS_AT_MOST = 3  # times those that a step takes


@contextmanager
def serving(
    port: int, model: Path, state_dir: Path, settings: Mapping[str, object], screen: Screen
) -> Iterator[Stage]:
    """`trainer serve`, up. Raises ChildError."""
    phase_of = screen.phase("start vLLM, proxy and FSDP ranks")
    phase = phase_of.__enter__()
    with served(port, model, state_dir, settings, lambda note: phase.update(note=note)) as stage:
        phase.note = stage.url
        phase_of.__exit__(None, None, None)
        yield stage


async def examine(
    name: str, attempt: Attempt, exam: Sequence[Task], stage: Stage, screen: Screen
) -> Exam:
    """Success on tasks of one split, greedy and at temperature 1."""
    version = stage.version
    scores: dict[str, Score] = {}
    with screen.phase(name, 2 * len(exam)) as phase:
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):

            def show(score: Score, kind: str = kind) -> None:
                stage.check()
                scores[kind] = score
                note = "  ".join(f"{k} {s.rate:.2f}" for k, s in scores.items())
                phase.update(sum(s.rollouts for s in scores.values()), note)

            scores[kind] = await rollouts.evaluate(
                attempt, exam, temperature, exam[0].split, progress=show, tags={"exam": kind}
            )
    return Exam(version, scores["greedy"], scores["sampled"])


async def learn(
    attempt: Attempt,
    tasks: Iterable[Any],
    stage: Stage,
    screen: Screen,
    *,
    steps: int,
    groups: int,
    samples: int,
    shuffle_rewards: int | None = None,
) -> None:
    """Sends training tasks to the agent until the trainer has made `steps` and is idle.

    `groups` of `samples` rollouts each make a step.
    """
    if not steps:
        return
    recent: deque[float] = deque(maxlen=groups * samples)

    def until_trained() -> Iterator[Any]:
        for task in islice(tasks, steps * GROUPS_AT_MOST * groups):
            if stage.last_step >= steps:
                return
            yield task

    async def permit() -> None:
        while stage.last_step < steps:
            stage.check()
            with suppress(TimeoutError):
                await intake(samples, timeout_s=1.0)
                return

    with screen.phase("training, while the agent works", steps) as phase:
        found = rollouts.train(
            attempt,
            until_trained(),
            samples=samples,
            permit=permit,
            shuffle_rewards=shuffle_rewards,
        )
        async for group in found:
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


def trainer_seconds(stage: Stage) -> dict[str, float]:
    """By stage, over all steps."""
    seconds: Counter[str] = Counter()
    for step in stage.steps():
        seconds.update(step.metrics["seconds"])
    return dict(seconds)


def largest_gap(stage: Stage) -> float:
    """|log-prob gap| of the two engines on on-policy tokens, over all steps."""
    return max((step.metrics["gap_max"] for step in stage.steps()), default=0.0)
