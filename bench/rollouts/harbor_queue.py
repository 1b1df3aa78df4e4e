"""Harbor's own queue with the same workload, as a script for a Python of its own (3.12, `pip
install harbor`): its schedule and nothing else of it, for its trials are played by the scripted
engine. Reads the workload from the standard input, and prints one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# A script: it finds its neighbour beside it.
from workload import Engine, Rollout  # type: ignore[import-not-found]


async def main() -> None:
    from harbor.trial.queue import TrialQueue

    given = json.load(sys.stdin)
    engine = Engine(given["scale"])
    rollouts = [Rollout(group, tuple(steps)) for group, steps in given["rollouts"]]

    class Trial:
        """Of Harbor's, as far as its queue knows it."""

        def __init__(self, config: Any) -> None:
            self.config = config

        @classmethod
        async def create(cls, config: Any) -> Trial:
            return cls(config)

        def add_hook(self, *_: object) -> None: ...

        async def run(self) -> Any:
            await engine.play(self.config.rollout)
            return SimpleNamespace(recorded_exceptions=list)

    agent = SimpleNamespace(n_concurrent=None)
    configs: list[Any] = [SimpleNamespace(rollout=each, agent=agent) for each in rollouts]
    queue = TrialQueue(given["concurrency"])
    with patch("harbor.trial.trial.Trial", Trial):
        began = time.monotonic()
        await asyncio.gather(*queue.submit_batch(configs))
        seconds = time.monotonic() - began
    print(json.dumps({"seconds": seconds, "busy_s": engine.busy_s, "calls": engine.calls}))


if __name__ == "__main__":
    asyncio.run(main())
