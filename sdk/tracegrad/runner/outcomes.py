"""How a command ends, as a rollout's outcome: the first cause, apart from the policy's doing."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tracegrad.events import Outcome

# Who sends these did not ask the agent: the kernel, out of memory, or somebody at this machine.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
PROXY_AWAY = "the proxy did not answer at its end"
CALL_FAILED = "its last LLM call failed on the serving side"


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """`exit_code`: negative is a signal's number; None where it was never started, or did not end
    by itself. `error`: why it could not be started. `last_line`: of what it printed.
    `silent_s`: it was ended because it showed no life for so many seconds. `out_of_memory`: it was
    killed at its sandbox's bound, as the engine says."""

    exit_code: int | None
    seconds: float
    timed_out: bool = False
    error: str | None = None
    last_line: str = ""
    silent_s: float | None = None
    out_of_memory: bool = False

    def describe(self) -> str:
        if self.error is not None:
            return f"could not be started: {self.error}"
        if self.silent_s is not None:
            return f"printed nothing and made no LLM call for {self.silent_s:g} s, and was ended"
        if self.timed_out:
            return f"timed out after {self.seconds:.0f} s"
        assert self.exit_code is not None
        if self.exit_code < 0:
            return f"was killed by {_signal_name(-self.exit_code)}"
        if self.out_of_memory:
            return "was killed at its sandbox's memory bound"
        return f"ended with exit code {self.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of those for real time only two have one
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Classified:
    """`reason` is None where there is nothing to explain."""

    outcome: Outcome
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CallsMade:
    """LLM calls that the proxy has of a rollout. `last_failed`: by the engine or the proxy."""

    count: int
    last_failed: bool = False


def serving_failure(calls: CallsMade | None) -> str | None:
    """Why what an agent did at its end is not the policy's doing. `calls` None: the proxy does not
    answer."""
    if calls is None:
        return PROXY_AWAY
    return CALL_FAILED if calls.last_failed else None


def classify(end: ProcessEnd, calls: CallsMade | None) -> Classified:
    """`calls` None: the proxy does not answer.

    A command that ends badly before any call was never driven by the policy: scoring it would
    punish the policy for a missing file or a slow start. Nor is it the policy's doing where the
    proxy or the engine is away: what the agent waited for, or stumbled over, was its next reply.
    """
    said = end.describe()
    if end.last_line:
        said += f": {end.last_line}"
    if end.error is not None:
        return Classified(Outcome.ENV_ERROR, said)
    if end.exit_code != 0 and (why := serving_failure(calls)) is not None:
        return Classified(Outcome.INFRA_ERROR, f"{said} ({why})")
    uncalled = calls is not None and calls.count == 0
    if end.timed_out or end.silent_s is not None:
        if uncalled:
            return Classified(Outcome.INFRA_ERROR, f"{end.describe()} without one LLM call")
        return Classified(Outcome.BUDGET, end.describe())
    assert end.exit_code is not None
    if end.exit_code == 0:
        return Classified(Outcome.COMPLETED)
    if end.exit_code < 0 and -end.exit_code in _FROM_OUTSIDE:
        return Classified(Outcome.INFRA_ERROR, said)
    if uncalled:
        return Classified(Outcome.ENV_ERROR, f"{said} (before any LLM call)")
    return Classified(Outcome.AGENT_ERROR, said)
