"""Samples live prompts again, each as a group of rollouts, when the trainer wants rollouts.

It goes through the proxy as any agent does: captured, held while weights are pushed, and paced by
the trainer's settings (`intake`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass

import httpx

from tracegrad.decorators import rollout
from tracegrad.intake_client import intake
from tracegrad.protocol import AGENT_HEADER, agent_header
from tracegrad.store import StoreUnavailable
from tracegrad_trainer.config.resample import RESAMPLE_OF, RESAMPLED
from tracegrad_trainer.resampling.live_prompts import AGENT, LivePrompt, LivePrompts

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_AFTER_FAILURE_S = 2.0


@dataclass(slots=True)
class ResampleTotals:
    """Since the start of this process. `failed`: rollouts whose call did not succeed."""

    prompts: int = 0
    rollouts: int = 0
    failed: int = 0


class PromptSampler:
    """`concurrency` prompts at a time, until it is cancelled. `client`: without a time-out, for the
    proxy holds calls for as long as it says."""

    def __init__(self, prompts: LivePrompts, client: httpx.AsyncClient) -> None:
        self.prompts = prompts
        self.totals = ResampleTotals()
        self._client = client
        self._picking = asyncio.Lock()

    async def run(self) -> None:
        """Raises StoreError, ProxyRefused."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.prompts.settings.concurrency):
                group.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        while True:
            prompt = await self._next()
            # Last: places that nobody takes are given to others only after a minute.
            rollouts = await self._room()
            if await self.sample(prompt, rollouts) == rollouts:
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def _next(self) -> LivePrompt:
        async with self._picking:  # one look at a time, or two take the same
            while True:
                try:
                    if (found := await asyncio.to_thread(self.prompts.take)) is not None:
                        return found
                except StoreUnavailable as error:
                    logger.warning("the store is away, and is looked at again: %s", error)
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _room(self) -> int:
        """For a group. A trainer that is not there yet says nothing of its size."""
        while True:
            room = await intake()
            if room.paced:
                return room.rollouts
            await asyncio.sleep(_LOOK_EVERY_S)

    async def sample(self, prompt: LivePrompt, rollouts: int) -> int:
        """One group. Returns how many failed; each has its reason in the store."""
        ended = await asyncio.gather(*(self._attempt(prompt) for _ in range(rollouts)))
        self.totals.prompts += 1
        self.totals.rollouts += rollouts
        failures = [error for error in ended if error is not None]
        self.totals.failed += len(failures)
        if failures:
            logger.warning(
                "%d of %d rollouts of the first prompt of %s failed: %s",
                *(len(failures), rollouts, prompt.rollout_id, failures[0]),
            )
        return len(failures)

    async def _attempt(self, prompt: LivePrompt) -> str | None:
        """Why it failed."""
        tags = {**prompt.tags, RESAMPLED: "true", RESAMPLE_OF: prompt.rollout_id}
        task, asked = f"{RESAMPLE_OF}:{prompt.rollout_id}", prompt.body["messages"][-1]
        try:
            with rollout(task, tags=tags, agent=AGENT, input=asked) as opened:
                headers = {"authorization": f"Bearer {opened.api_key}"}
                if prompt.agent_name is not None:
                    headers[AGENT_HEADER] = agent_header(prompt.agent_name)
                url = f"{opened.base_url}/chat/completions"
                answer = await self._client.post(url, json=prompt.body, headers=headers)
                answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            return f"{error.response.status_code} {error.response.text[:300]}"
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def said(self) -> dict[str, object]:
        """For `trainer status`."""
        unmatched = self.prompts.patterns.unmatched
        return asdict(self.totals) | {
            "unusable": dict(self.prompts.unusable),
            "unmatched": unmatched,
        }
