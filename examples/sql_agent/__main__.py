"""`make sql-agent`: an agent in LangGraph learns to write SQL, and only because of its rewards.

Three seeds, each with a model and training questions of its own, must rise on held-out questions;
learning rate 0 and shuffled rewards must not. The last line is one JSON object; the exit code is 1
if one of them did what it must not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from examples.shop import controls
from rich.console import Console


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sql-agent", description=__doc__)
    parser.add_argument("--short", action="store_true", help="what CI runs: one seed, small")
    short = parser.parse_args().short
    started = time.monotonic()
    seeds, steps, tasks, required = (1, 6, 45, 0.0) if short else (3, 40, 120, 0.3)
    try:
        found, wrong = controls.run(
            # Weights that do not change are pushed and examined all the same: two steps show it.
            controls.variants(seeds=seeds, model_seeds=not short, steps_without_learning=2)[
                : 1 if short else None
            ],
            demo="examples.sql_agent.small" if short else "examples.sql_agent.demo",
            steps=steps,
            tasks=tasks,
            required=required,
            console=Console(highlight=False),
        )
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        print(f"sql-agent: {error}", file=sys.stderr)
        return 1
    for line in wrong:
        print(line, file=sys.stderr)
    seconds = round(time.monotonic() - started)
    print(json.dumps(controls.summary(found) | {"seconds": seconds}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
