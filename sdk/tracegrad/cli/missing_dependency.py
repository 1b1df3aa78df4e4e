"""Commands in an install that lacks what they need: one line that says what to install.

Nothing here needs more than the light install that agents use.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from tracegrad.version import VERSION

_DISTRIBUTION = "tracegrad"


def print_version_if_asked() -> None:
    """`--version` and nothing else: it needs no library, so that a report of a fault has it."""
    if sys.argv[1:] == ["--version"]:
        print(f"tracegrad {VERSION}")
        sys.exit()


@contextmanager
def naming_the_extra(command: str, extra: str) -> Iterator[None]:
    """Ends the process with one line where a library of one of our extras is not installed.

    Other modules that are missing are somebody's mistake, and keep their traceback.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not is_ours_to_install(error.name):
            raise
        sys.exit(
            f"{command}: {error.name} is not installed: pip install '{_DISTRIBUTION}[{extra}]'"
        )


def is_ours_to_install(module: str) -> bool:
    """Whether a module belongs to a library that tracegrad or one of its extras requires, by the
    custom that a library is named like its module."""
    name = _normalized(module)
    try:
        required = metadata.requires(_DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:  # run from a folder of sources
        return False
    names = (_normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in required)
    return any(name == each or name.startswith(f"{each}-") for each in names)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
