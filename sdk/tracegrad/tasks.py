"""What a task is called when its caller did not say: stable names from what was asked.

The same function with the same arguments is the same task, in this process and in the next, so
that several attempts at it form a group. Hence no memory address and no set order may show.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import Any

DEEPEST = 8
LONGEST_TEXT = 100_000  # characters
MOST_ITEMS = 1_000  # of a list or a mapping
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def task_id(function: Callable[..., object], arguments: Mapping[str, object]) -> str:
    """16 hex characters from the function's qualified name and its arguments."""
    asked = json.dumps(_plain(arguments), sort_keys=True, separators=(",", ":"))
    name = f"{_module(function)}.{qualified_name(function)}"
    return hashlib.sha256(f"{name}({asked})".encode("utf-8", "replace")).hexdigest()[:16]


def qualified_name(function: Callable[..., object]) -> str:
    """The name as a person would write it: `Agent.solve`, without the scopes around it."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _module(function: Callable[..., object]) -> str:
    """The module's name, also for the file that was started as the main program."""
    name = str(getattr(function, "__module__", ""))
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return Path(file).stem if file else name


def plain(value: object) -> Any:
    """`value` as JSON would have it: what JSON lacks by its `repr`, what is very long cut."""
    return _plain(value, short=True)


def _plain(value: object, *, short: bool = False, depth: int = 0) -> Any:
    def inner(item: object) -> Any:
        return _plain(item, short=short, depth=depth + 1)

    if isinstance(value, str):
        return _cut(str(value), short)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < DEEPEST and isinstance(value, Mapping | list | tuple | AbstractSet):
        most = MOST_ITEMS if short else None
        more = len(value) - MOST_ITEMS if short else 0
        if isinstance(value, Mapping):
            pairs = islice(value.items(), most)
            mapping = {_cut(str(key), short): inner(item) for key, item in pairs}
            return {**mapping, "…": f"{more} more"} if more > 0 else mapping
        items = [inner(item) for item in islice(value, most)]
        if isinstance(value, AbstractSet):
            items.sort(key=json.dumps)
        return [*items, f"… ({more} more)"] if more > 0 else items
    return _cut(_repr(value), short)


def _repr(value: object) -> str:
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:  # a repr of the agent's own; its call is not to fail for it
        return f"<{type(value).__qualname__}>"


def _cut(text: str, short: bool) -> str:
    if not short or len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}… ({len(text) - LONGEST_TEXT} more characters)"
