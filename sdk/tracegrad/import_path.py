"""A user's own function, named in settings as `package.module:function`."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any


def is_import_path(name: str) -> bool:
    """Whether the name is a user's own function, of which nothing is known but its signature."""
    return ":" in name


@functools.cache
def import_part(kind: str, path: str) -> Callable[..., Any]:
    """The function at `package.module:function`; `kind` says in errors what it was wanted as.

    Raises:
        ValueError: it cannot be imported, or called.
    """
    if not is_import_path(path):
        raise ValueError(f"{kind} {path!r}: write package.module:function")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{kind} {path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{kind} {path!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
