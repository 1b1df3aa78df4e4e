"""Which turns of a rollout are to be trained at all: by agent, by model, by span path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from tracegrad.events import Turn
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.utils.candidate_name import policy_name

TURN_NOT_SELECTED = "turn_not_selected"
_UNKNOWN = TurnScope(None)
# Agents choose these names: a line has a few of them, the beginning of each, as Python writes it.
_MOST_NAMES, _MOST_CHARACTERS = 5, 60


class UnmatchedPattern(NamedTuple):
    """A pattern that fits nothing of what was looked at, and what there is."""

    setting: str
    pattern: str
    found: list[str]

    @property
    def name(self) -> str:
        return f"{self.setting} = {self.pattern!r}"

    def __str__(self) -> str:
        there = ", ".join(map(_quoted, self.found[:_MOST_NAMES])) or "none"
        if len(self.found) > _MOST_NAMES:
            there += f" and {len(self.found) - _MOST_NAMES} more"
        return f"{self.name} fits no turn; there are: {there}"


def is_selected(turn: Turn, settings: BatchSettings, scopes: Mapping[str, TurnScope]) -> bool:
    """Each of the three settings has to fit. `scopes`: by turn id; a turn that is not in it has
    neither agent nor spans."""
    return all(matches(patterns, names) for _, patterns, names in _asked(turn, settings, scopes))


def matches(patterns: Sequence[str], names: Iterable[str]) -> bool:
    """Whether one of the names fits a pattern, or there is no pattern without "!" in front, and
    none of them fits one with it. * and ? stand for any characters, also for /."""
    names = list(names)
    out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    return (not wanted or _fits(wanted, names)) and not _fits(out, names)


def unmatched_patterns(
    turns: Iterable[Turn], settings: BatchSettings, scopes: Mapping[str, TurnScope]
) -> list[UnmatchedPattern]:
    """Patterns that say nothing, most of all those with a typing error."""
    there: dict[str, tuple[Sequence[str], set[str]]] = {}
    for turn in turns:
        for setting, patterns, names in _asked(turn, settings, scopes):
            there.setdefault(setting, (patterns, set()))[1].update(names)
    return [
        UnmatchedPattern(setting, pattern, sorted(names))
        for setting, (patterns, names) in there.items()
        for pattern in patterns
        if not _fits([pattern.removeprefix("!")], names)
    ]


def selection_patterns(settings: BatchSettings) -> dict[str, Sequence[str]]:
    """By the name of the setting, of those that are set."""
    every = {
        "batches.agents": settings.agents,
        "batches.models": settings.models,
        "batches.span_paths": settings.span_paths,
    }
    return {setting: patterns for setting, patterns in every.items() if patterns}


def _asked(
    turn: Turn, settings: BatchSettings, scopes: Mapping[str, TurnScope]
) -> list[tuple[str, Sequence[str], Sequence[str]]]:
    """Settings that are set, their patterns, and what the turn has of it."""
    scope = scopes.get(turn.turn_id, _UNKNOWN)
    names: dict[str, Sequence[str]] = {
        "batches.agents": [scope.agent] if scope.agent else [],
        "batches.models": _model_names(turn),
        "batches.span_paths": scope.span_paths,
    }
    patterns = selection_patterns(settings)
    return [(setting, patterns[setting], names[setting]) for setting in patterns]


def _model_names(turn: Turn) -> list[str]:
    """As it was asked for, as it is served, and as the policy is, of which that is a candidate."""
    asked = [] if turn.asked_model is None else [turn.asked_model]
    return [*asked, turn.model, policy_name(turn.model)]


def _quoted(name: str) -> str:
    if len(name) > _MOST_CHARACTERS:
        name = f"{name[: _MOST_CHARACTERS - 1]}…"
    return repr(name)


def _fits(patterns: Iterable[str], names: Iterable[str]) -> bool:
    names = list(names)
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)
