"""Which patterns of a selection fit no turn so far, of turns that come little by little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracegrad.events import Turn
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.turn_selector import (
    UnmatchedPattern,
    selection_patterns,
    unmatched_patterns,
)

_MOST_NAMES = 100  # that are kept of what there is: agents choose them


class PatternWatch:
    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._fitted: set[tuple[str, str]] = set()  # setting and pattern
        self._unmatched: dict[tuple[str, str], UnmatchedPattern] = {}  # the others, once looked at

    def look(
        self, turns: Sequence[Turn], scopes: Mapping[str, TurnScope]
    ) -> list[UnmatchedPattern]:
        """Returns patterns that fit none of these, nor any turn before, and that were not returned
        yet. `scopes`: by turn id."""
        if not turns:
            return []
        found = {
            (each.setting, each.pattern): each
            for each in unmatched_patterns(turns, self._settings, scopes)
        }
        every = selection_patterns(self._settings).items()
        self._fitted |= {(setting, one) for setting, some in every for one in some} - found.keys()
        before = self._unmatched
        self._unmatched = {
            key: _with_names(each, before.get(key))
            for key, each in found.items()
            if key not in self._fitted
        }
        return [each for key, each in self._unmatched.items() if key not in before]

    @property
    def unmatched(self) -> dict[str, str]:
        """By its name a line of each pattern that no turn has fitted so far, with the names that
        there are."""
        return {each.name: str(each) for each in self._unmatched.values()}

    @property
    def unfitted(self) -> list[str]:
        """Settings because of which nothing is selected: of their patterns none has fitted so far.
        Those that only leave something out are no such patterns."""
        return [
            setting
            for setting, patterns in selection_patterns(self._settings).items()
            if (wanted := [one for one in patterns if not one.startswith("!")])
            and all((setting, one) in self._unmatched for one in wanted)
        ]


def _with_names(now: UnmatchedPattern, before: UnmatchedPattern | None) -> UnmatchedPattern:
    """With what there was before, too."""
    names = {*now.found, *(before.found if before is not None else ())}
    return now._replace(found=sorted(names)[:_MOST_NAMES])
