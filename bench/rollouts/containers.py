"""Rollouts in Docker containers: ready ones of the warm pool, and ones that start when they are
asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from bench.rollouts.commands import Many, many, sleepers
from bench.rollouts.workload import workload
from tracegrad.context import proxy_url
from tracegrad.runner.sandbox import SandboxBackend, SandboxSpec
from tracegrad.runner.sandbox_backend import ContainerOptions, sandbox_backend

IMAGE = "busybox"
AT_ONCE, WARM = 2, 4


@dataclass(frozen=True, slots=True)
class Containers:
    """`warm`: without the first WARM, for which none was ready."""

    image: str
    warm: Many
    cold: Many


def measured(image: str, count: int, scale: float, logs: Path) -> Containers:
    """`count` warm ones, and an eighth of that cold. Raises SandboxError, ValueError: there is no
    engine, or no such image."""
    spec = SandboxSpec(image=image, cpus=1, memory_mb=256, pids=64)
    asyncio.run(_one(spec))  # the image is there then, and the engine awake
    # Long enough that the pool makes another one meanwhile: what is measured are ready ones.
    tasks = sleepers(workload(WARM + count, 1, seed=3), 3 * scale, spec)
    warm = asyncio.run(many(tasks, AT_ONCE, logs, _backend(spec, warm=WARM)))
    warm.ended_ = warm.ended_[WARM:]
    tasks = sleepers(workload(max(2, count // 8), 1, seed=4), scale, spec)
    return Containers(image, warm, asyncio.run(many(tasks, 1, logs, _backend(spec, warm=0))))


async def _one(spec: SandboxSpec) -> None:
    backend = _backend(spec, warm=0)
    try:
        await (await backend.start(spec)).close()
    finally:
        await backend.close()


def _backend(spec: SandboxSpec, *, warm: int) -> SandboxBackend:
    return sandbox_backend([spec], proxy=proxy_url(), options=ContainerOptions(warm=warm))
