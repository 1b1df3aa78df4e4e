"""What a selection that fits nothing must not cost: rollouts.

Where no pattern of `batches.agents` (`models`, `span_paths`) has fitted a turn, one of them is
misspelt, most likely, or the agent that it names has not come yet. Each batch would be consumed
with nothing trained. So it is given back, and set aside for a while, so that others are looked at
instead. With the first turn that fits all is as usual: turns that are not selected are consumed
with that reason, and so are those that were set aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set

from tracegrad.events import Json, Turn
from tracegrad.store import Group
from tracegrad.text_format import format_count
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.pattern_watch import PatternWatch
from tracegrad_trainer.batches.turn_selector import UnmatchedPattern

# What is set aside is looked at again after so many seconds, and each time after twice as many:
# spans may come late, and each look is a lease in the store.
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 600.0


class SelectionWatch:
    """Of one process. `looks_again`: at what is set aside, where turns or spans may yet come."""

    def __init__(
        self,
        settings: BatchSettings,
        *,
        looks_again: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patterns = PatternWatch(settings)
        self._looks_again = looks_again
        self._clock = clock
        self._set_aside: dict[str, int] = {}  # rollout -> turns
        self.groups = 0  # that are set aside
        self._wait_s = FIRST_WAIT_S
        self._again_at = 0.0

    def look(
        self, turns: Sequence[Turn], scopes: Mapping[str, TurnScope]
    ) -> list[UnmatchedPattern]:
        """At the turns of a batch. Returns as `PatternWatch.look`."""
        new = self.patterns.look(turns, scopes)
        if not self.patterns.unfitted:
            self._wait_s = FIRST_WAIT_S
            self._let_go()
        return new

    @property
    def selects_nothing(self) -> bool:
        """Whether none of all turns so far was selected, for want of a pattern that fits."""
        return bool(self.patterns.unfitted)

    def set_aside(self, groups: Sequence[Group]) -> None:
        """They are given back, and are not to be leased for a while."""
        if not self._set_aside:
            self._again_at = self._clock() + self._wait_s
        self.groups += len(groups)
        for rollout in (one for group in groups for one in group.rollouts):
            self._set_aside[rollout.rollout_id] = len(rollout.turns)

    def held_back(self) -> Set[str]:
        """Rollouts that are not to be leased now."""
        if self._looks_again and self._set_aside and self._clock() >= self._again_at:
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
            self._let_go()
        return self._set_aside.keys()

    @property
    def turns_set_aside(self) -> int:
        return sum(self._set_aside.values())

    def explain_given_back(self) -> str | None:
        """Why what was given back is not trained; None: nothing was."""
        if not self._set_aside:
            return None
        rollouts, settings = len(self._set_aside), " or ".join(self.patterns.unfitted)
        return (
            f"{format_count(rollouts, 'rollout')} {'is' if rollouts == 1 else 'are'} given back:"
            f" nothing fits {settings} so far; training goes on with the first turn that does (or"
            " start again with other patterns)"
        )

    def report(self) -> Json:
        """For the run's state."""
        return {
            "unmatched": self.patterns.unmatched,
            "given_back": self.explain_given_back(),
        }

    def _let_go(self) -> None:
        self._set_aside, self.groups = {}, 0
