"""What tasks are called on a screen: under `@trace` their ids are hashes, and say nothing.

The input of a rollout is kept as it was given, less what was redacted; a title is its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, select

from tracegrad.jsonutil import text_or_json
from tracegrad.store.models import Rollouts
from tracegrad.store.rows import rows_of_keys

MAX_TITLE = 200  # characters
# As `tracegrad.task_ids.task_and_input` makes them.
_HASH = re.compile(r"[0-9a-f]{16}")


def title_of_task(task_id: str | None, asked: str | None) -> str | None:
    """The id that somebody chose, or else what was asked. None: there is neither."""
    if asked is not None and (task_id is None or _HASH.fullmatch(task_id)):
        return asked
    return task_id


def load_inputs(connection: Connection, rollout_ids: Collection[str]) -> dict[str, str]:
    """The beginning of each rollout's input, by rollout; those without one are left out."""
    query = select(Rollouts.rollout_id, Rollouts.task)
    # One by one: an input may have megabytes.
    rows = rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids)
    return {rollout_id: text for rollout_id, task in rows if (text := input_text(task))}


def input_text(task: Any) -> str | None:
    """The beginning of an input, at most `MAX_TITLE` characters. Of a call's arguments a text
    comes first, as it is; `self` goes without saying."""
    if isinstance(task, Mapping):
        task = _arguments_text(task)
    if task is None:
        return None
    text = task if isinstance(task, str) else text_or_json(task)
    # More is cut before white space is looked at: it may be very long.
    words = " ".join(text[: 4 * MAX_TITLE].split())
    cut = len(words) > MAX_TITLE or len(text) > 4 * MAX_TITLE
    return (f"{words[: MAX_TITLE - 1]}…" if cut else words) or None


def _arguments_text(arguments: Mapping[str, Any]) -> str | None:
    shown = {name: v for name, v in arguments.items() if name not in ("self", "cls")}
    texts = [name for name, value in shown.items() if isinstance(value, str)]
    first = texts[0] if texts else next(iter(shown), None)
    if first is None:
        return None
    rest = [f"{name}={text_or_json(v)}" for name, v in shown.items() if name != first]
    return " · ".join([text_or_json(shown[first]), *rest])
