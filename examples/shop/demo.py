"""`make demo`: an agent that already exists gets better while it runs.

A small Qwen3 is made from nothing and warmed up on careless demonstrations; `trainer serve`
serves it; the agent of `agent.py` works on training tasks while the trainer learns from its
turns and pushes weights; held-out tasks, never trained on, say what it was worth. The last line
is one JSON object; the exit code is 1 if held-out success did not rise by `REQUIRED_RISE`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import command

if TYPE_CHECKING:
    from .play import Play

ROOT = Path(".tracegrad/demo")
REQUIRED_RISE = 0.5


def main() -> int:
    return command.main("make demo", __doc__, ROOT, _play, required_rise=REQUIRED_RISE)


def _play() -> Play:
    from .run import PLAY

    return PLAY


if __name__ == "__main__":
    sys.exit(main())
