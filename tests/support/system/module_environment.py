"""The environment of a process that is started as `python -m support.…`."""

from __future__ import annotations

import os
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
