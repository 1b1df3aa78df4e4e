"""The process in which rollouts are scored: `python -m ... SETTINGS.json`.

A part of `trainer serve`. It reads the resolved settings of the run, and the store's URL from the
environment where that has a password. User code never runs in it, but in children of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from tracegrad.private_files import open_private, private_folder
from tracegrad.store import Store, StoreUnavailable
from tracegrad.urls import unmasked
from tracegrad_trainer.rewards.config import RewardSettings
from tracegrad_trainer.rewards.scoring import ScoringRun, ScoringScope
from tracegrad_trainer.utils.worker_process import run_worker

# Run with -m, where __name__ is "__main__".
logger = logging.getLogger("tracegrad_trainer.rewards.worker")

LOOK_EVERY_S = 0.5
_ALIVE_EVERY_S = 2.0


def sign_of_life(state_dir: Path) -> Path:
    """The file that a worker writes while it is at work: its process, and when
    (`launch.run_state`)."""
    return state_dir / "run" / "scorers.json"


def scope_of(resolved: dict[str, Any]) -> ScoringScope:
    """Of the resolved settings of a trainer, as JSON."""
    data, batches = resolved["data"], resolved["batches"]
    promotion = resolved.get("promotion", {})
    return ScoringScope(
        tags=data["tags"],
        group_size=batches["group_size"],
        incomplete_after_s=data["incomplete_after_s"],
        seed=resolved["seed"],
        held_out=promotion["tags"] if promotion.get("gate") == "held_out" else None,
    )


async def work(
    store: Store,
    settings: RewardSettings,
    scope: ScoringScope,
    *,
    state_dir: Path,
    stop: asyncio.Event,
) -> None:
    """Until `stop`. Raises FunctionUnusable, StoreError."""
    async with ScoringRun(store, settings, scope) as run:
        alive = asyncio.create_task(_say_alive(state_dir))
        ending = asyncio.create_task(stop.wait())
        logger.info("at work: %s", ", ".join(settings.scorers) or "sums alone")
        try:
            while not stop.is_set():
                try:
                    await _either(run.look(), ending)
                except StoreUnavailable as error:
                    logger.warning("the store is away, and is looked at again: %s", error)
                await _either(run.wait(LOOK_EVERY_S), ending)
        finally:
            alive.cancel()
            ending.cancel()


async def _either(wanted: Awaitable[Any], ending: asyncio.Task[Any]) -> None:
    """`wanted`, unless it is to end first."""
    task = asyncio.ensure_future(wanted)
    await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    task.result()


async def _say_alive(state_dir: Path) -> None:
    path = sign_of_life(state_dir)
    while True:
        try:
            said = json.dumps({"pid": os.getpid(), "updated_at": time.time()})
            await asyncio.to_thread(_write, path, said)
        except OSError as error:  # a full disk is no reason to end
            logger.warning("%s cannot be written: %s", path, error.strerror)
        await asyncio.sleep(_ALIVE_EVERY_S)


def _write(path: Path, text: str) -> None:
    private_folder(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open_private(beside, "wb") as file:  # no word of it has to outlive the machine
        file.write(text.encode())
    beside.replace(path)


async def _work(resolved: dict[str, Any], stop: asyncio.Event) -> None:
    settings = RewardSettings.model_validate(resolved["rewards"])
    with Store.open(unmasked(resolved["proxy"]["store"])) as store:
        await work(
            store,
            settings,
            scope_of(resolved),
            state_dir=Path(resolved["state_dir"]),
            stop=stop,
        )


if __name__ == "__main__":
    sys.exit(run_worker("scorers", _work))
