"""What must not be stored is taken out before anything is.

A hook is a function of the user's, named as `module:function` in the setting `redact`. It gets
the texts of one event and returns what may be kept of them, or None for nothing at all:

    {"type": "turn", "request": {...}, "response": {...}, "stop": ...}
    {"type": "span", "name": "...", "attributes": {...}}
    {"type": "rollout_started", "task": ..., "tags": {...}}
    {"type": "rollout_finished", "error": "..."}

The record is a copy, to be changed at will. Hooks run one after the other, in threads: one may be
called from several at a time.

Hooks see text, never tokens. A turn's token ids are what a model is trained on, and are stored as
they were: whoever has the tokenizer can turn them back into text. A text that must not be on the
disk in any form must not be sent to the model through a recording proxy.

When a hook fails, its event is stored without any text, which is counted and logged; an event is
never lost for it, and never stored as it was.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import json
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tracegrad.events import Event, Json, RolloutFinished, RolloutStarted, Span, Turn
from tracegrad.jsonutil import dump_json
from tracegrad.store.maintenance.drop_text import without_texts_of_event

log = logging.getLogger("tracegrad.proxy")

REDACTED = "[redacted]"

HookFunction = Callable[[Json], Json | None]


class HookError(ValueError):
    """A hook that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Hook:
    name: str
    function: HookFunction


def load_hooks(names: Sequence[str]) -> list[Hook]:
    """The functions that the setting `redact` names. Raises HookError."""
    return [Hook(name, _load(f"redact[{index}]", name)) for index, name in enumerate(names)]


class Redactor:
    """Applies hooks to events. `failed` counts those that were stored without their texts because
    a hook failed on them. Without `keep_text` no event keeps what was said (`without_text`)."""

    def __init__(self, hooks: Sequence[Hook], *, keep_text: bool = True) -> None:
        self.hooks = tuple(hooks)
        self.keep_text = keep_text
        self.failed = 0

    @property
    def is_active(self) -> bool:
        """Whether what is stored may be something else than what was said."""
        return bool(self.hooks) or not self.keep_text

    async def redact(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events as they may be stored; the very same where nothing is changed."""
        if not self.is_active:
            return events
        if not self.hooks:
            return [without_texts_of_event(event) for event in events]
        return await asyncio.to_thread(lambda: [self.redact_event(event) for event in events])

    def redact_event(self, event: Event) -> Event:
        cleaned = self._cleaned(event)
        return cleaned if self.keep_text else without_texts_of_event(cleaned)

    def _cleaned(self, event: Event) -> Event:
        texts = texts_of(event)
        if texts is None:
            return event
        hook = self.hooks[0]
        try:
            record: Json | None = copy.deepcopy(texts)
            for hook in self.hooks:
                record = hook.function(record) if record is not None else None
            if record is None:
                return with_texts(event, {})
            # As it would be stored: a hook's own classes are not known where that is done.
            return with_texts(event, json.loads(dump_json(record)))
        except Exception as error:
            self._say(hook, event, error)
            return with_texts(event, {})

    def _say(self, hook: Hook, event: Event, error: Exception) -> None:
        """Loudly, but not once a call for ever; and without the error's own words, which may be
        what was to be taken out."""
        self.failed += 1
        if self.failed & (self.failed - 1) == 0:
            last = traceback.extract_tb(error.__traceback__)[-1]
            log.error(
                "redact: %s failed (%s at %s:%s): a %s is stored without its texts; %d so far",
                hook.name,
                type(error).__name__,
                last.filename,
                last.lineno,
                type(event).__name__,
                self.failed,
            )


def texts_of(event: Event) -> Json | None:
    """What hooks see of an event; None for one that holds no texts."""
    match event:
        case Turn():
            stop = event.sampling.get("stop")
            return {
                "type": "turn",
                "request": event.request,
                "response": event.response,
                "stop": stop,
            }
        case Span():
            return {"type": "span", "name": event.name, "attributes": event.attributes}
        case RolloutStarted():
            return {"type": "rollout_started", "task": event.task, "tags": dict(event.tags)}
        case RolloutFinished():
            return {"type": "rollout_finished", "error": event.error}
    return None


def with_texts(event: Event, record: Json) -> Event:
    """The event with the record's texts; those that the record lacks are gone.

    Raises TypeError for a text that is not of its kind.
    """
    match event:
        case Turn():
            return replace(
                event,
                request=_one_of(record, "request", dict),
                response=_one_of(record, "response", dict),
                sampling=_with_stop(event.sampling, record.get("stop")),
            )
        case Span():
            return replace(
                event,
                name=_one_of(record, "name", str) or REDACTED,
                attributes=_one_of(record, "attributes", dict) or {},
            )
        case RolloutStarted():
            tags = _one_of(record, "tags", dict) or {}
            if not all(isinstance(text, str) for pair in tags.items() for text in pair):
                raise TypeError("tags")
            return replace(event, task=record.get("task"), tags=tags)
        case RolloutFinished():
            return replace(event, error=_one_of(record, "error", str))
    return event


def secrets(record: Json) -> Json | None:
    """A hook: API keys, tokens and private keys of well-known forms, wherever they stand."""
    cleaned: Json = _cleaned(record)
    return cleaned


# How tokens begin, and how they go on.
_TOKENS = {
    **dict.fromkeys(("AKIA", "ASIA", "ABIA", "ACCA"), r"[A-Z2-7]{16}(?![A-Za-z0-9])"),  # AWS
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{36,}"),
    "github_pat_": r"\w{22,}",
    "glpat-": r"[\w-]{20,}",
    # OpenAI, Anthropic and those who do as they do. A digit, so that words with hyphens pass.
    "sk-": r"(?=[A-Za-z_-]{0,256}[0-9])[\w-]{20,}",
    "tg-": r"[\w.:@-]{1,128}\.[\w-]{43}(?![\w-])",  # this proxy's own
    "hf_": r"[A-Za-z0-9]{30,}",
    "npm_": r"[A-Za-z0-9]{36,}",
    "xox": r"[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
    **dict.fromkeys(("sk_live_", "sk_test_", "rk_live_", "rk_test_"), r"[A-Za-z0-9]{16,}"),
    "whsec_": r"[A-Za-z0-9+/=]{20,}",
    "AIza": r"[\w-]{35}",  # Google
    "ya29.": r"[\w-]{20,}",
    "eyJ": r"[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{16,}",  # JSON web tokens
}
# Others, by the words without which none is there. A group is what is kept of a match.
_OTHERS = {
    # PEM; where its end is missing, all that follows
    ("PRIVATE KEY",): r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    ("earer ", "EARER ", "asic ", "ASIC "): r"((?i:bearer|basic) {1,3})"
    r"(?=[A-Za-z._~+/=-]{0,256}[0-9])[\w.~+/=-]{16,}",
    ("ccess_key", "ccessKey", "CCESS_KEY", "ession_token", "essionToken", "ESSION_TOKEN"): (
        r"((?i:secret_?access_?key|aws_?session_?token)\W{1,6})[A-Za-z0-9/+=]{40,}"
    ),
    ("://",): r"(://[^\s/:@]{1,64}:)[^\s/:@]{3,256}(?=@)",
}


def _token(prefix: str, rest: str) -> re.Pattern[str]:
    """Tokens that stand alone, or after a line's end that JSON within JSON spells as \\n."""
    start = re.escape(prefix)
    return re.compile(rf"{start}(?:(?<![\w-]{start})|(?<=\\[nrt]{start})){rest}", re.ASCII)


# Each is looked for only where one of its words is, which is much faster than a pattern that
# tries them all everywhere. One that can run on begins once in a run of its characters, and what
# it looks ahead for is bounded: the time is linear in the text, whoever wrote it.
_PATTERNS: list[tuple[tuple[str, ...], re.Pattern[str]]] = [
    *(((prefix,), _token(prefix, rest)) for prefix, rest in _TOKENS.items()),
    *((words, re.compile(pattern, re.ASCII | re.DOTALL)) for words, pattern in _OTHERS.items()),
]


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        for words, pattern in _PATTERNS:
            if any(word in value for word in words):
                value = pattern.sub(_kept, value)
        return value
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    return value


def _kept(match: re.Match[str]) -> str:
    return "".join(match.groups()) + REDACTED


def _with_stop(sampling: Json, stop: Any) -> Json:
    kept = {name: value for name, value in sampling.items() if name != "stop"}
    return kept if stop is None else {**kept, "stop": stop}


def _one_of(record: Json, name: str, kind: type[Any]) -> Any:
    value = record.get(name)
    if value is not None and not isinstance(value, kind):
        raise TypeError(name)
    return value


def _load(where: str, name: str) -> HookFunction:
    module_name, _, function_name = name.partition(":")
    try:
        function: Any = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise HookError(f"{where}: cannot load {name!r}: {type(error).__name__}: {error}") from None
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise HookError(f"{where}: {name!r} is not a plain function")
    return function  # type: ignore[no-any-return]
