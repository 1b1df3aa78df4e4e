"""What `tracegrad redact` applies: the proxy's hooks, and a pattern as one of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from tracegrad.events import Event, Json
from tracegrad.proxy.capture.redaction import REDACTED, Hook, texts_of, with_texts
from tracegrad.store.encoding.blobs import dump_json


class HookFailed(Exception):
    """A hook failed on a stored text. At capture such a fact loses all its texts; what is stored
    already is worth more care."""


def make_cleaner(hooks: Sequence[Hook]) -> Callable[[Event], Event]:
    """A fact as it may stay. Raises CleaningFailed."""

    def clean(fact: Event) -> Event:
        texts = texts_of(fact)
        if texts is None:
            return fact
        record: Json | None = copy.deepcopy(texts)
        for hook in hooks:
            try:
                record = hook.function(record) if record is not None else None
                cleaned = with_texts(fact, record or {})
                dump_json(record)
            except Exception as error:
                # Without its own words, which may be what is to be taken out.
                raise HookFailed(
                    f"{hook.name} failed on a {texts['type']} ({type(error).__name__})"
                ) from error
        return cleaned

    return clean


def pattern_hook(text: str, *, literal: bool) -> Hook:
    """ValueError: it is no pattern, or one that is everywhere."""
    if not text:
        raise ValueError("it is empty")
    try:
        pattern = re.compile(re.escape(text) if literal else text)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    if pattern.search("") is not None:
        raise ValueError("it matches an empty text: it would be found everywhere")

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            # What a run before this one put there is no text: a second run changes nothing.
            return REDACTED.join(pattern.sub(_taken_out, part) for part in value.split(REDACTED))
        if isinstance(value, dict):
            return {cleaned(key): cleaned(item) for key, item in value.items()}
        if isinstance(value, list):
            return [cleaned(item) for item in value]
        return value

    def function(record: Json) -> Json:
        # What kind of record it is belongs to us.
        return {key: item if key == "type" else cleaned(item) for key, item in record.items()}

    return Hook("a literal text" if literal else "a pattern", function)


def _taken_out(match: re.Match[str]) -> str:
    return REDACTED if match[0] else ""
