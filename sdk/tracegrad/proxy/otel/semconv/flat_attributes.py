"""Attributes with dotted names, `a.0.b`, as the trees that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tracegrad.events import Json


def unflatten(attributes: Mapping[str, Any], prefix: str) -> Json:
    """What stands below `prefix`, by the parts of its name. A name that is both a value and the
    beginning of others keeps the others."""
    tree: Json = {}
    start = prefix + "."
    for name, value in attributes.items():
        if not name.startswith(start):
            continue
        *path, last = name[len(start) :].split(".")
        branch = tree
        for part in path:
            inner = branch.get(part)
            if not isinstance(inner, dict):
                inner = branch[part] = {}
            branch = inner
        if not isinstance(branch.get(last), dict):
            branch[last] = value
    return tree


def in_index_order(tree: Any) -> list[Json]:
    """The branches named by numbers, by their numbers; however far apart these are."""
    numbered = sorted(_numbered(tree), key=lambda pair: pair[0])
    return [branch for _, branch in numbered if isinstance(branch, dict)]


def _numbered(tree: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(tree, Mapping):
        # `int` gives up on thousands of digits; nobody counts so far.
        names = (name for name in tree if name.isascii() and name.isdigit() and len(name) < 10)
        yield from ((int(name), tree[name]) for name in names)
