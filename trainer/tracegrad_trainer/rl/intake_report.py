"""What this trainer asks of drivers, kept up to date in the store for as long as it lives.

The store has it for all proxies. A thread says every `HEARTBEAT_S` that we live; who is dead holds
no driver back. Nothing here ends a run: where the store cannot be written, drivers go by what stood
there before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from tracegrad.store import Group, Store, StoreError
from tracegrad.store.ledger.intake import HEARTBEAT_S, Intake, IntakeRequest
from tracegrad.store.ledger.intake_capacity import IntakeLimits
from tracegrad.store.ledger.leases import OverSample
from tracegrad_trainer.config.trainer import TrainerSettings

logger = logging.getLogger(__name__)

RATE_STEPS = 8  # of so many of the last steps


class IntakeReport:
    def __init__(
        self, settings: TrainerSettings, store: Store, owner: str, *, every_s: float = HEARTBEAT_S
    ) -> None:
        """`owner`: as of the leases. Nothing is asked for before `update`."""
        self._intake = Intake(store)
        self._every_s = every_s
        self._wanted = IntakeRequest(
            owner=owner,
            version=0,
            limits=intake_limits(settings),
            tags=settings.data.tags,
            silent_s=settings.data.silent_s,
        )
        self._steps: deque[float] = deque(maxlen=RATE_STEPS + 1)  # when the last ones were served
        self._counted_until: float | None = None  # by the store's clock
        self._said: IntakeRequest | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def update(
        self, *, version: int | None = None, made: Iterable[Group] = (), stepped: bool = False
    ) -> None:
        """The weights of `version` are served, and `made` are groups of steps that are not
        committed. `stepped`: by a step of just now."""
        now = time.monotonic()
        if stepped or not self._steps:
            self._steps.append(now)
        self._put(
            replace(
                self._wanted,
                version=self._wanted.version if version is None else version,
                made=sorted({group.lease_id for group in made}),
                step_s=step_seconds(self._steps),
                useless=0,
            ),
            stepped=stepped,
        )

    def set_useless(self, groups: int) -> None:
        """So many that are held, or given back, teach nothing: others are to take their place."""
        if groups != self._wanted.useless:
            self._put(replace(self._wanted, useless=groups))

    def metrics(self) -> dict[str, float]:
        """Of places that drivers were given since the last time. Raises StoreError."""
        until = self._intake.now()
        after, self._counted_until = self._counted_until, until
        found = self._intake.granted(after=until if after is None else after, until=until)
        return {"intake_places": float(found.places), "intake_waited_s": found.waited_s}

    def withdraw(self) -> None:
        """Training ends: nobody is held back by it."""
        self.close()
        try:
            self._intake.withdraw(self._wanted.owner)
        except StoreError as error:
            logger.warning("drivers are not told that training ends: %s", error)

    def close(self) -> None:
        """No more signs of life."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _put(self, wanted: IntakeRequest, *, stepped: bool = False) -> None:
        self._wanted = wanted
        try:
            self._intake.request(wanted, stepped=stepped)
        except StoreError as error:
            logger.warning("what is asked of drivers cannot be written: %s", error)
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._renew, name="intake", daemon=True)
            self._thread.start()

    def _renew(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self._intake.renew(self._wanted.owner)
            except StoreError as error:
                logger.warning("drivers are not told that this trainer lives: %s", error)


def intake_limits(settings: TrainerSettings) -> IntakeLimits:
    """The bounds that the settings give."""
    batches, data = settings.batches, settings.data
    waits = batches.max_staleness if batches.stale == "wait" else None
    return IntakeLimits(
        groups=batches.groups,
        group_size=batches.group_size,
        attempts=batches.group_size + data.over_sample,
        in_flight=data.in_flight,
        max_staleness=0 if data.synchronous else waits,
        synchronous=data.synchronous,
    )


def over_sample_of(settings: TrainerSettings) -> OverSample:
    return OverSample(settings.data.over_sample, settings.data.over_sample_keep)


def step_seconds(steps: Iterable[float]) -> float | None:
    """Seconds from one to the next, on average; None before there are two."""
    times = list(steps)
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
