"""The play's acts: people use the service and it learns what they like; somebody buys thumbs for
the wrong thing; a guard notices, and the last good version is served again; training goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from examples.shop.screen import Phase, Screen
from examples.shop.stage import Stage, served

from tracegrad.store import Decision

from .traffic import Reply, Traffic

STEPS = 40
# Of the exploit, at most: a guard that has not noticed by then has failed.
EXPLOITED_STEPS = 120
RESUMED_STEPS = 12
# Replies that say how the service does at some time.
SAMPLE = 300
SERVE: Mapping[str, object] = {
    "ranks": 1,
    "data.idle_s": 1.5,
    "batches.groups": 64,
    "batches.group_size": 1,
    "batches.tokens_per_micro_batch": 4096,
    "batches.max_staleness": 64,
    "objective.preset": "grpo",
    "objective.advantage": "running",
    # Thumbs come up to twenty versions late. A style that has been unlearnt since must not be
    # pushed down any more, and by the mean over a turn its first token, which decides, is hidden.
    "objective.correction_level": "turn_product",
    # A thumb down says what was wrong, and not what would be right: without a pull towards where
    # it began, a policy that is nearly sure is pushed to anything else.
    "objective.kl": "k3",
    "objective.kl_coef": 0.05,
    "optim.lr": 2e-4,
    "fsdp.reshard": "false",
    "fsdp.threads": 1,
    "push.drain_s": 0.2,
    "vllm.max_model_len": 256,
    "vllm.kv_cache_memory_bytes": 128 << 20,
    "guards.action": "rollback",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    port: int
    root: Path  # where the warm-started model is kept
    state_dir: Path
    seed: int = 0
    steps: int = STEPS
    shuffled: bool = False  # thumbs that say nothing: a control
    exploit: bool = True
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """How the service did then: the mean approval of some replies, by people's real preferences."""

    name: str
    at_s: float
    replies: int  # so many were given before
    approval: float
    asked_back: float


@dataclass(frozen=True, slots=True)
class Caught:
    """`noticed_s`, `steps`: since the exploit began. `resumed_steps`: made when training went on
    afterwards; `again`: what a guard said once more by then."""

    by: str
    reason: str
    version: int | None  # that is served again
    noticed_s: float
    steps: int
    resumed_steps: int = 0
    again: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    moments: Sequence[Moment]
    caught: Caught | None
    replies: Sequence[Reply]
    thumbs: int
    changed: int
    errors: Sequence[str]

    def at(self, name: str) -> Moment | None:
        return next((moment for moment in self.moments if moment.name == name), None)

    def approval(self, name: str) -> float | None:
        found = self.at(name)
        return None if found is None else found.approval


def run(plan: Plan, screen: Screen, loop: asyncio.Runner) -> Result:
    """The whole play. `loop`: the same for all, for the service's client keeps its connections.
    Raises ChildError when a process of the stack does not come or stay."""
    from .warm_start import RECIPE, warm_start

    with screen.phase("warm start", RECIPE.steps) as phase:
        model = warm_start(plan.root, lambda n, _, loss: phase.update(n, f"loss {loss:.2f}"))
    overrides = {**SERVE, "seed": plan.seed, "reference": model}
    if plan.learning_rate is not None:
        overrides["optim.lr"] = plan.learning_rate
    start = screen.phase("start vLLM, proxy and trainer")
    phase = start.__enter__()
    with served(plan.port, model, plan.state_dir, overrides, lambda n: phase.update(note=n)) as up:
        start.__exit__(None, None, None)
        return loop.run(_Play(plan, up, screen).run())


class _Play:
    def __init__(self, plan: Plan, stage: Stage, screen: Screen) -> None:
        self.plan, self.stage, self.screen = plan, stage, screen
        self.traffic = Traffic(stage.url, plan.seed, lambda: stage.version, shuffled=plan.shuffled)
        self.began = time.monotonic()
        self.moments: list[Moment] = []

    async def run(self) -> Result:
        caught = None
        async with self.traffic.running():
            await self._sample("before")
            await self._learn("people use it", self.plan.steps)
            await self._sample("learnt")
            if self.plan.exploit:
                caught = await self._exploit()
            if caught is not None:
                await self._sample("rolled back")
                caught = await self._go_on(caught)
                await self._sample("at the end")
        traffic = self.traffic
        return Result(
            moments=self.moments,
            caught=caught,
            replies=traffic.replies,
            thumbs=traffic.thumbs,
            changed=traffic.changed,
            errors=traffic.errors,
        )

    async def _learn(self, name: str, steps: int) -> None:
        until = self.stage.last_step + steps
        with self.screen.phase(name, until) as phase:
            await self._wait(lambda: self.stage.last_step >= until, phase)

    async def _exploit(self) -> Caught | None:
        """Until a guard has noticed, and what it asked for is done."""
        first, began = self.stage.last_step, time.monotonic()
        self.traffic.exploited = True
        limit = first + EXPLOITED_STEPS
        with self.screen.phase("somebody buys thumbs for replies that ask back") as phase:
            await self._wait(
                lambda: self._rollback() is not None or self.stage.last_step >= limit, phase
            )
        self.traffic.exploited = False
        found = self._rollback()
        if found is None:
            await self._sample("exploited")
            return None
        outcome = found.outcome or {}
        return Caught(
            by=found.by,
            reason=found.reason,
            version=outcome.get("version", found.version),
            noticed_s=round(time.monotonic() - began, 1),
            steps=self.stage.last_step - first,
        )

    def _rollback(self) -> Decision | None:
        """Of a guard, when it is served."""
        served = (one for one in self._asked() if one.acted_at and one.refused is None)
        return next((one for one in served if one.kind == "rollback"), None)

    def _asked(self) -> list[Decision]:
        """What guards decided."""
        return [one for one in self.stage.store.decisions() if one.by.startswith("guard:")]

    async def _go_on(self, caught: Caught) -> Caught:
        """Somebody has looked, ended the exploit, and takes back what was bought."""
        with self.screen.phase("bought thumbs are withdrawn") as phase:
            phase.note = f"{await self.traffic.withdraw_bought()} of them"
        resume = Decision(kind="resume", by="examples.live", reason="the exploit is over")
        self.stage.store.decide(resume)
        before, first = len(self._asked()), self.stage.last_step
        until = first + RESUMED_STEPS
        with self.screen.phase("training goes on", until) as phase:
            await self._wait(
                lambda: self.stage.last_step >= until or len(self._asked()) > before, phase
            )
        again = self._asked()[before:]
        return replace(
            caught,
            resumed_steps=self.stage.last_step - first,
            again=again[0].reason if again else None,
        )

    async def _sample(self, name: str) -> None:
        """From here on, so many replies."""
        first = len(self.traffic.replies)
        with self.screen.phase(f"replies, {name}", SAMPLE) as phase:
            while (found := len(self.traffic.replies) - first) < SAMPLE:
                self.stage.check()
                phase.update(found)
                await asyncio.sleep(0.2)
            some = self.traffic.replies[first : first + SAMPLE]
            approval = fmean(reply.approval for reply in some)
            asked_back = fmean(reply.asked_back for reply in some)
            phase.note = f"approval {approval:.2f}, {asked_back:.0%} ask back"
        at_s = time.monotonic() - self.began
        self.moments.append(Moment(name, round(at_s, 1), first, approval, asked_back))

    async def _wait(self, done: Callable[[], bool], phase: Phase) -> None:
        while not done():
            self.stage.check()
            recent = self.traffic.replies[-SAMPLE:]
            approval = fmean(reply.approval for reply in recent)
            phase.update(
                self.stage.last_step,
                f"approval {approval:.2f}  version {self.stage.version}"
                f"  {self.traffic.thumbs} thumbs  {self.stage.doing()}",
            )
            await asyncio.sleep(0.5)
