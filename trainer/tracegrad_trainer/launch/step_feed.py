"""Steps as they are committed, for those who tell of them."""

from __future__ import annotations

from tracegrad.store import StepHistory, StepRecord, Store


class StepFeed:
    """Each step once, from now on."""

    def __init__(self, store: Store) -> None:
        self._history = StepHistory(store)
        last = self._history.steps(limit=1)
        self._told = last[0].step if last else 0

    def new_steps(self) -> list[StepRecord]:
        """Those that were committed since the last call, in order."""
        found = self._history.after(self._told)
        if found:
            self._told = found[-1].step
        return found
