"""Traces in, gradients out: record what an agent does, so that its model can learn from it.

    from tracegrad import trace, reward, rollout

    @trace                      # a call is a rollout
    def solve(question):
        ...
        reward(1.0)             # what it was worth

    with rollout(task="t1", tags={"split": "train"}) as r:
        r.reward(0.5)

LLM calls to the proxy at TRACEGRAD_URL (default http://127.0.0.1:4141) that are made meanwhile
belong to the rollout. Importing starts nothing and reaches for no network. Where
TRACEGRAD_INSTRUMENT is set, it turns on the spans of agent frameworks, as `instrument()` does.
"""

import os
from typing import TYPE_CHECKING, Any

from tracegrad.context import Rollout, tags
from tracegrad.decorators import Reward, reward, rollout, trace, turn
from tracegrad.events import Outcome
from tracegrad.exporter import Stats, flush, stats
from tracegrad.feedback_client import Feedback, feedback
from tracegrad.instrumentation import instrument
from tracegrad.intake_client import Intake, intake, wait_for_intake
from tracegrad.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from tracegrad.runner.training_report import RunReport
    from tracegrad.runner.training_run import run, run_async


def __getattr__(name: str) -> Any:
    # asyncio and the runner are loaded where somebody runs tasks: an agent's process stays light.
    if name in ("RunReport", "run", "run_async"):
        from tracegrad.runner import training_run

        return getattr(training_run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Feedback",
    "Intake",
    "Outcome",
    "Reward",
    "Rollout",
    "RunReport",
    "Stats",
    "__version__",
    "feedback",
    "flush",
    "instrument",
    "intake",
    "reward",
    "rollout",
    "run",
    "run_async",
    "stats",
    "tags",
    "trace",
    "turn",
    "wait_for_intake",
]

if os.environ.get("TRACEGRAD_INSTRUMENT"):
    from tracegrad.instrument_variable import follow_instrument_variable

    follow_instrument_variable()
