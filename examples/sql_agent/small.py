"""`python -m examples.sql_agent.small`: the same with a smaller model, which is made sooner: what
`make sql-agent`'s short form runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from examples.shop import command

from .demo import ROOT

if TYPE_CHECKING:
    from examples.shop.play import Play

REQUIRED_RISE = 0.2


def main() -> int:
    name = "examples.sql_agent.small"
    return command.main(name, __doc__, ROOT, _play, required_rise=REQUIRED_RISE)


def _play() -> Play:
    from .run import SMALL_PLAY

    return SMALL_PLAY


if __name__ == "__main__":
    sys.exit(main())
