"""What tasks are called on a screen: under `@trace` their ids are hashes, and say nothing.

The input of a rollout is kept as it was given, less what was redacted; a title is its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, select

from tracegrad.jsonutil import text_or_json
from tracegrad.store.filters import MIN_TASK_PREFIX
from tracegrad.store.models import Rollouts
from tracegrad.store.rows import rows_of_keys
from tracegrad.text_format import cut_text, shorten_apart

MAX_TITLE = 200  # characters
# Inputs that begin alike are told apart by so many characters of them.
_COMPARED = 20 * MAX_TITLE
# As `tracegrad.task_ids.task_and_input` makes them.
_HASH = re.compile(r"[0-9a-f]{16}")


def is_hash(task_id: str | None) -> bool:
    """Whether `@trace` made the task's id of a function and its arguments."""
    return task_id is not None and _HASH.fullmatch(task_id) is not None


def short_task_ids(task_ids: Collection[str]) -> dict[str, str]:
    """So many first characters of each hash that they differ, and `--task` knows them."""
    hashes = {each for each in task_ids if is_hash(each)}
    width = MIN_TASK_PREFIX
    while len({each[:width] for each in hashes}) < len(hashes):
        width += 1
    return {each: each[:width] if each in hashes else each for each in task_ids}


def title_of_task(task_id: str | None, asked: str | None) -> str | None:
    """The id that somebody chose, or else what was asked. None: there is neither."""
    if asked is not None and (task_id is None or is_hash(task_id)):
        return asked
    return task_id


def load_inputs(connection: Connection, rollout_ids: Collection[str]) -> dict[str, str]:
    """The beginning of each rollout's input, by rollout, and of those that begin alike where they
    part; those without one are left out."""
    query = select(Rollouts.rollout_id, Rollouts.task)
    # One by one: an input may have megabytes.
    rows = rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids)
    asked = {name: text for name, task in rows if (text := input_text(task, _COMPARED))}
    titles = shorten_apart(asked.values(), MAX_TITLE)
    return {rollout_id: titles[text] for rollout_id, text in asked.items()}


def input_text(task: Any, most: int = MAX_TITLE) -> str | None:
    """The beginning of an input, at most `most` characters. Of a call's arguments a text
    comes first, as it is; `self` goes without saying."""
    if isinstance(task, Mapping):
        task = _arguments_text(task)
    if task is None:
        return None
    text = task if isinstance(task, str) else text_or_json(task)
    # More is cut before white space is looked at: it may be very long.
    words = " ".join(text[: 4 * most].split())
    if len(text) > 4 * most:
        words += "…"
    return cut_text(words, most) or None


def _arguments_text(arguments: Mapping[str, Any]) -> str | None:
    shown = {name: v for name, v in arguments.items() if name not in ("self", "cls")}
    texts = [name for name, value in shown.items() if isinstance(value, str)]
    first = texts[0] if texts else next(iter(shown), None)
    if first is None:
        return None
    rest = [f"{name}={text_or_json(v)}" for name, v in shown.items() if name != first]
    return " · ".join([text_or_json(shown[first]), *rest])
