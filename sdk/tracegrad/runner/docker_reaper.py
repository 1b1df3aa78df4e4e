"""What runners left behind that were killed: containers, networks and snapshots of dead owners.

Another runner that lives keeps its own, and so does one of which nobody can see from here whether
it lives (another machine at the same engine, another PID namespace).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from docker.errors import APIError

from tracegrad.runner.docker_engine import DockerEngine
from tracegrad.runner.sandbox_owner import OWNER_LABEL, SandboxOwner

log = logging.getLogger("tracegrad.runner")

NAME_PREFIX = "tracegrad-"
_OURS = {"label": [OWNER_LABEL]}


async def reap_leftovers(engine: DockerEngine) -> int:
    """How many containers were removed. Raises SandboxUnavailable."""
    api, removed = engine.api, 0
    for found in await _listed(engine, api.containers, all=True):
        # An image that somebody made of a container of ours carries its labels, and gives them to
        # containers that are not ours; names are not given on.
        ours = any(name.startswith(f"/{NAME_PREFIX}") for name in found.get("Names") or ())
        if ours and _is_left(found, running=found.get("State") == "running"):
            with suppress(APIError):  # another one reaps, too
                await engine.call(api.remove_container, found["Id"], v=True, force=True)
                removed += 1
    for found in await _listed(engine, api.networks):
        if _is_left(found, running=True):
            with suppress(APIError):
                await engine.call(api.remove_network, found["Id"])
    for found in await _listed(engine, api.images):
        if _is_left(found, running=True):
            with suppress(APIError):
                await engine.call(api.remove_image, found["Id"])
    if removed:
        log.info("removed %d containers of runners that are gone", removed)
    return removed


async def _listed(engine: DockerEngine, function: Any, **named: Any) -> list[Mapping[str, Any]]:
    try:
        found: list[Mapping[str, Any]] = await engine.call(function, filters=_OURS, **named)
        return found
    except APIError as error:
        log.warning("the engine does not say what was left behind: %s", error)
        return []


def _is_left(found: Mapping[str, Any], *, running: bool) -> bool:
    """`running`: it may be somebody's who lives. One that does not run, of an owner whom nobody can
    see, is left from before this machine's boot."""
    owner = SandboxOwner.parse((found.get("Labels") or {}).get(OWNER_LABEL, ""))
    if owner is None:
        return False
    dead = owner.is_dead()
    return owner.boot != SandboxOwner.this_process().boot and not running if dead is None else dead
