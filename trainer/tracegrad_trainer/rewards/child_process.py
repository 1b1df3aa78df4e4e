"""Processes of scorers: in a session of their own, killed whole, and ended when we are."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from tracegrad_trainer.utils.subprocesses import die_with_parent, inherited_environment

LOG = 2  # where what children print goes: our own stderr


def prepare() -> None:
    """In the child, before its program."""
    die_with_parent(signal.SIGKILL)


def scorer_environment(secret: str | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what is secret: the keys of settings, and the variable of the judge's key."""
    found = inherited_environment()
    if secret is not None:
        found.pop(secret, None)
    return {**found, "PYTHONSAFEPATH": "1", **(more or {})}


async def kill(process: asyncio.subprocess.Process) -> None:
    """With all that it started, and that did not leave its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def describe_end(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
