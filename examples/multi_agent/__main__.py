"""`make multi-agent`: two agents answer questions about a database, and one of them is trained.

An author writes queries and rewrites them, a reviewer says whether they are right; both are served
by one model. `batches.agents = ["author"]`: the reviewer's turns are context alone. Success on
held-out questions must rise, and no turn of the reviewer may be trained: else the exit code is 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from examples.shop import command

if TYPE_CHECKING:
    from examples.shop.play import Play, Result

# Its warm start is the SQL agent's.
ROOT = Path(".tracegrad/sql-agent")
REQUIRED_RISE = 0.2


def main() -> int:
    name = "examples.multi_agent"
    return command.main(name, __doc__, ROOT, _play, required_rise=REQUIRED_RISE, check=_check)


def _play() -> Play:
    from .run import PLAY

    return PLAY


def _check(result: Result) -> str | None:
    from .run import what_is_wrong

    return what_is_wrong(result)


if __name__ == "__main__":
    sys.exit(main())
