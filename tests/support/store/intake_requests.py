"""What a trainer asks of drivers, for the intake's tests."""

from __future__ import annotations

from typing import Any

from tracegrad.store.ledger.intake import IntakeRequest
from tracegrad.store.ledger.intake_capacity import IntakeLimits


def intake_request(*, owner: str = "me", version: int = 0, **changes: Any) -> IntakeRequest:
    """A batch of two groups of two. `changes` of the limits, and `tags`, `made`, `useless`,
    `silent_s`, `step_s` of the rest."""
    limits: dict[str, Any] = {"groups": 2, "group_size": 2, "attempts": 2}
    rest: dict[str, Any] = {"tags": {}, "silent_s": 600.0}
    for name, value in changes.items():
        (rest if name in IntakeRequest.__dataclass_fields__ else limits)[name] = value
    return IntakeRequest(owner=owner, version=version, limits=IntakeLimits(**limits), **rest)
