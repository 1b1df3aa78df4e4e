"""What commands that start ranks print of patterns that fit no turn: each once, when it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tracegrad_trainer.launch.run_state import read_state


def unmatched_patterns_of(state_dir: Path) -> dict[str, str]:
    """By name, of batches and of live prompts, as those say that look at them. Ranks may have ended
    by now; what is left of a worker is an earlier run's."""
    ranks, worker = (read_state(state_dir, part) or {} for part in ("ranks", "resampling"))
    prompts: dict[str, str] = worker.get("unmatched", {}) if worker.get("alive") else {}
    batches: dict[str, str] = ranks.get("unmatched", {})
    return prompts | batches


class PatternNotice:
    """Asked at every poll of the ranks."""

    def __init__(self, state_dir: Path, say: Callable[[str], None]) -> None:
        self._state_dir = state_dir
        self._say = say
        self._said: set[str] = set()

    def tick(self) -> None:
        for pattern, line in unmatched_patterns_of(self._state_dir).items():
            if pattern not in self._said:
                self._said.add(pattern)
                self._say(line)
