"""A secret in stored conversations, and rules that redact it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.store.conversations import request, response
from support.store.events import chain
from tracegrad.cli.commands.redact import make_cleaner, pattern_hook
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.store.maintenance import RedactionRule, RolloutSelection

SECRET = "correct horse battery staple"


WORDS = "words that make a message long enough to be shared with the next request, and again. " * 4


def rule(text: str = SECRET, **more: Any) -> RedactionRule:
    selection = more.pop("selection", RolloutSelection())
    clean = make_cleaner([pattern_hook(text, literal=True)])
    return RedactionRule(selection=selection, clean=clean, name="a literal text", **more)


def conversation(store: Store, *texts: str, rollout_id: str = "r") -> list[Turn]:
    """Each turn repeats all messages before it, and was stored by itself."""
    turns = chain(
        rollout_id,
        len(texts),
        request=lambda number: request(*(f"{WORDS}{text}" for text in texts[: number + 1])),
        response=lambda number: response(f"reply {number} to {texts[number]}"),
        created_at=1000.0,
    )
    for turn in turns:
        store.append([turn])
    return turns


def without(turn: Turn, text: str = SECRET) -> Turn:
    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(text, "[redacted]")
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items()}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return replace(turn, request=cleaned(turn.request), response=cleaned(turn.response))
