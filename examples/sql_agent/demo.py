"""`python -m examples.sql_agent.demo`: one seed of `make sql-agent`.

A small Qwen3 is made from nothing and warmed up on a careless colleague's queries; `trainer serve`
serves it; a LangGraph agent answers training questions in SQL while the trainer learns from its
turns; held-out questions, about figures that no training question names, say what it was worth.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from examples.shop import command

if TYPE_CHECKING:
    from examples.shop.play import Play

ROOT = Path(".tracegrad/sql-agent")
REQUIRED_RISE = 0.5


def main() -> int:
    name = "examples.sql_agent.demo"
    return command.main(name, __doc__, ROOT, _play, required_rise=REQUIRED_RISE)


def _play() -> Play:
    from .run import PLAY

    return PLAY


if __name__ == "__main__":
    sys.exit(main())
