"""The process that samples live prompts again: `python -m ... SETTINGS.json`.

A part of `trainer serve`. It reads the resolved settings of the run, and from the environment the
store's URL and the proxy's key, where they are secret.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path
from typing import Any

import httpx

from tracegrad.store import Store, StoreError
from tracegrad.transport import ProxyRefused
from tracegrad.urls import unmasked
from tracegrad_trainer.batches import BatchSettings
from tracegrad_trainer.config.resample import ResampleSettings
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.launch.workers import RESAMPLING
from tracegrad_trainer.resampling.live_prompts import LivePrompts
from tracegrad_trainer.resampling.sampler import PromptSampler
from tracegrad_trainer.utils.worker_process import run_worker

_SAY_EVERY_S = 2.0


async def work(sampler: PromptSampler, state: RunState, stop: asyncio.Event) -> None:
    """Until `stop`. Raises StoreError, ProxyRefused."""
    ending = asyncio.create_task(stop.wait())
    sampling = asyncio.create_task(sampler.run())
    try:
        while not stop.is_set() and not sampling.done():
            state.update(stage="sampling", **sampler.said())
            await asyncio.wait(
                {ending, sampling}, timeout=_SAY_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
        if sampling.done():
            sampling.result()
    except* (StoreError, ProxyRefused) as errors:
        raise errors.exceptions[0] from None
    finally:
        ending.cancel()
        sampling.cancel()
        await asyncio.gather(ending, sampling, return_exceptions=True)
        state.update(stage="stopped", **sampler.said())


async def _work(resolved: dict[str, Any], stop: asyncio.Event) -> None:
    promotion = resolved["promotion"]
    # Of the batches' settings no more: a predicate of the user's is the ranks' to import.
    selection = {name: resolved["batches"][name] for name in ("agents", "models")}
    with Store.open(unmasked(resolved["proxy"]["store"])) as store:
        prompts = LivePrompts(
            store,
            ResampleSettings.model_validate(resolved["resample"]),
            held_out=promotion["tags"] if promotion["gate"] == "held_out" else None,
            selection=BatchSettings.model_validate(selection),
        )
        # Without the environment's proxies; certificates as the SDK has them.
        trusted = ssl.create_default_context()
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=trusted) as client:
            state = RunState(Path(resolved["state_dir"]), RESAMPLING)
            await work(PromptSampler(prompts, client), state, stop)


if __name__ == "__main__":
    sys.exit(run_worker(RESAMPLING, _work))
