"""What the page shows of the proxy that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyState:
    """`waiting`: calls, by what they wait for. `calls`: that ended, by status. `untrainable` and
    `lost`: turns, by reason. `up`: of each server whether it gets calls; None: nobody has called it
    yet. `submissions` wait to be written, `submission_bytes` in all."""

    version: int
    workers: list[int]  # process ids
    in_flight: int
    waiting: Mapping[str, int]
    held: bool
    up: Mapping[str, bool | None]
    calls: Mapping[str, int]
    turns: int
    untrainable: Mapping[str, int]
    lost: Mapping[str, int]
    submissions: int
    submission_bytes: int
