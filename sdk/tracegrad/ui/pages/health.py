"""Whether all is well: the proxy's processes and calls, the trainer, what waits for training, and
the store's own check when somebody asks for it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from tracegrad.events import Json
from tracegrad.inspect.reasons import ReasonText, untrained_text
from tracegrad.store import Decision, StepHistory, StepRecord, Store
from tracegrad.store.ledger.intake import DEAD_AFTER_S, Intake, IntakeState
from tracegrad.store.ledger.readiness import newest_states
from tracegrad.store.maintenance import DoctorReport, examine
from tracegrad.ui.proxy_state import ProxyState
from tracegrad.ui.security import BASE

PATH = f"{BASE}/health"
# Rollouts of the queue that are looked at, of each kind.
QUEUE = 2_000
# Rollouts whose turns the check reads.
EXAMINED = 200
# Of `[rewards]`: what makes the reward a sum of parts (the trainer's `rewards.config.COMPOSING`).
_COMPOSING = ("functions", "commands", "judge", "length", "format", "weights")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """As the store knows it: a trainer asks for rollouts while it runs, and commits steps."""

    last: StepRecord | None
    intake: IntakeState
    paused: Decision | None

    @property
    def alive(self) -> bool | None:
        """None: none ever asked for rollouts here."""
        silent = self.intake.silent_for_s
        return None if silent is None else silent <= DEAD_AFTER_S


@dataclass(frozen=True, slots=True)
class Selection:
    """What the last step's trainer selects by, whether it compares rollouts, and whether their
    reward is composed of parts."""

    tags: dict[str, str]
    compared: bool
    composed: bool


@dataclass(frozen=True, slots=True)
class QueueState:
    """One row of the queue."""

    state: str
    count: int
    text: ReasonText


def health_values(store: Store, proxy: ProxyState | None) -> dict[str, Any]:
    """What the template needs. `proxy` None: nobody told of one (a store that is looked at by
    itself)."""
    last = StepHistory(store).steps(1)
    step = StepHistory(store).step(last[0].step) if last else None
    selection = _selection(step.settings if step else {})
    asked = selection or Selection({}, compared=False, composed=False)
    with store.reading() as connection:
        found = newest_states(
            connection, asked.tags, compared=asked.compared, composed=asked.composed, most=QUEUE
        )
    queue = [
        QueueState(state, count, untrained_text(state))
        for state, count in sorted(found.counts.items(), key=lambda each: -each[1])
    ]
    return {
        "proxy": proxy,
        "trainer": TrainerState(step, Intake(store).state(), store.training_pause()),
        "queue": queue,
        "queue_cut": found.is_cut,
        "most": QUEUE,
        "tags": asked.tags,
        "settings_read": selection is not None,
        "store_name": store.database.describe(),
        "examined": EXAMINED,
    }


def _selection(settings: Json) -> Selection | None:
    """Of a trainer's settings; None: they cannot be read."""
    data, batches, rewards = (settings.get(name, {}) for name in ("data", "batches", "rewards"))
    if not all(isinstance(table, dict) for table in (data, batches, rewards)):
        return None
    tags, size = data.get("tags") or {}, batches.get("group_size", 1)
    if not isinstance(tags, dict) or not isinstance(size, int):
        return None
    if not all(isinstance(value, str) for value in tags.values()):
        return None
    composed = any(rewards.get(name) for name in _COMPOSING)
    return Selection(tags, compared=size > 1, composed=composed)


class DoctorDesk:
    """One check at a time in this process: it reads much of the store."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def examine(self, store: Store) -> DoctorReport | None:
        """None: another one is under way."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            return examine(store, max_rollouts=EXAMINED)
        finally:
            self._busy.release()
