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
# Rollouts whose turns the check reads: a minute's work at most, of any store.
EXAMINED = 200


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
    tags, compared = _selection(step.settings if step else {})
    with store.reading() as connection:
        found = newest_states(connection, tags, compared=compared, most=QUEUE)
    queue = [
        QueueState(state, count, untrained_text(state))
        for state, count in sorted(found.items(), key=lambda each: -each[1])
    ]
    return {
        "proxy": proxy,
        "trainer": TrainerState(step, Intake(store).state(), store.training_pause()),
        "queue": queue,
        "queue_cut": QUEUE if any(each.count >= QUEUE for each in queue) else None,
        "tags": tags,
        "store_name": store.database.describe(),
        "examined": EXAMINED,
    }


def _selection(settings: Json) -> tuple[dict[str, str], bool]:
    """The tags that the last step's trainer selected by, and whether it compares rollouts."""
    tags = (settings.get("data") or {}).get("tags") or {}
    size = (settings.get("batches") or {}).get("group_size", 1)
    return tags, isinstance(size, int) and size > 1


class DoctorDesk:
    """One check at a time: it reads much of the store."""

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
