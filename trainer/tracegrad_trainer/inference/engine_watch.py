"""Who was started again since the last push gets what is served, without waiting for the next one.

An engine starts with the weights of its model folder, and a proxy with calls held: agents wait
until both have what the trainer serves. A step may take minutes, so a thread of rank 0's looks.
"""

from __future__ import annotations

import logging
from threading import Event, Thread
from typing import Protocol

from tracegrad_trainer.inference.control_routes import PushError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_LAST_LOOK_S = 10.0  # an engine that hangs is waited for no longer


class Restorable(Protocol):
    """What a `WeightPusher` does of it."""

    @property
    def version(self) -> int: ...

    def restore(self) -> bool: ...


class EngineWatch:
    """Looks while the context is open."""

    def __init__(self, pusher: Restorable, *, every_s: float = LOOK_EVERY_S) -> None:
        self._pusher = pusher
        self._every_s = every_s
        self._ending = Event()
        self._thread = Thread(target=self._run, name="engine-watch", daemon=True)
        self._said: str | None = None

    def __enter__(self) -> EngineWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(_LAST_LOOK_S)

    def look(self) -> None:
        """Once. What fails is tried again at the next look, and said once."""
        try:
            if self._pusher.restore():
                logger.warning(
                    "vLLM or the proxy was started again: version %d is served as before",
                    self._pusher.version,
                )
            self._said = None
        except PushError as error:
            if str(error) != self._said:
                logger.warning("version %d is not served yet: %s", self._pusher.version, error)
            self._said = str(error)

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self.look()
