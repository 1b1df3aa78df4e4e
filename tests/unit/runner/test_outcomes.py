"""Ends of commands as outcomes: who is to blame."""

from __future__ import annotations

import pytest

from tracegrad.events import Outcome
from tracegrad.runner.outcomes import CallsMade, ProcessEnd, classify
from tracegrad.runner.reward import RewardFailed, printed_reward
from tracegrad.runner.task import RewardSource

BAD_END = ProcessEnd(3, 1.0, last_line="no such tool")
LATE = ProcessEnd(None, 60.0, timed_out=True)


@pytest.mark.parametrize(
    ("end", "calls", "outcome", "said"),
    [
        (ProcessEnd(0, 1.0), 4, Outcome.COMPLETED, None),
        (ProcessEnd(0, 1.0, last_line="done"), 0, Outcome.COMPLETED, None),
        (BAD_END, 4, Outcome.AGENT_ERROR, "exit code 3: no such tool"),
        (BAD_END, None, Outcome.INFRA_ERROR, "exit code 3: no such tool (the proxy did not answer"),
        (ProcessEnd(0, 1.0), None, Outcome.COMPLETED, None),
        (BAD_END, 0, Outcome.ENV_ERROR, "before any LLM call"),
        (LATE, 4, Outcome.BUDGET, "timed out after 60 s"),
        (LATE, None, Outcome.INFRA_ERROR, "timed out after 60 s (the proxy did not answer"),
        (LATE, 0, Outcome.INFRA_ERROR, "without one LLM call"),
        (ProcessEnd(-9, 1.0), 4, Outcome.INFRA_ERROR, "SIGKILL"),
        (ProcessEnd(-11, 1.0), 4, Outcome.AGENT_ERROR, "SIGSEGV"),
        (ProcessEnd(-40, 1.0), 4, Outcome.AGENT_ERROR, "killed by signal 40"),
        (ProcessEnd(None, 0.0, error="x: no such file"), 0, Outcome.ENV_ERROR, "x: no such file"),
    ],
)
def test_a_failure_is_the_policys_only_where_the_policy_was_asked(
    end: ProcessEnd, calls: int | None, outcome: Outcome, said: str | None
) -> None:
    found = classify(end, None if calls is None else CallsMade(calls))
    assert found.outcome == outcome
    assert said is None if found.reason is None else said is not None and said in found.reason


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (BAD_END, Outcome.INFRA_ERROR),
        (LATE, Outcome.INFRA_ERROR),
        (ProcessEnd(0, 1.0), Outcome.COMPLETED),
    ],
)
def test_an_engine_that_failed_last_is_not_the_policys_doing(
    end: ProcessEnd, outcome: Outcome
) -> None:
    assert classify(end, CallsMade(4, last_failed=True)).outcome == outcome


@pytest.mark.parametrize(
    ("end", "source", "value"),
    [
        (ProcessEnd(0, 1.0), "exit_code", 1.0),
        (ProcessEnd(1, 1.0), "exit_code", 0.0),
        (ProcessEnd(0, 1.0, last_line="0.25"), "last_line", 0.25),
        (ProcessEnd(0, 1.0, last_line="-1e3"), "last_line", -1000.0),
    ],
)
def test_a_reward_is_read(end: ProcessEnd, source: RewardSource, value: float) -> None:
    assert printed_reward(end, source) == value


@pytest.mark.parametrize(
    ("end", "source", "why"),
    [
        (ProcessEnd(2, 1.0), "exit_code", "exit code 2"),
        (ProcessEnd(-9, 1.0), "exit_code", "SIGKILL"),
        (ProcessEnd(1, 1.0, last_line="1"), "last_line", "exit code 1"),
        (ProcessEnd(0, 1.0, last_line="well done"), "last_line", "no number"),
        (ProcessEnd(0, 1.0), "last_line", "no number"),
        (ProcessEnd(0, 1.0, last_line="nan"), "last_line", "no reward"),
        (LATE, "exit_code", "timed out"),
    ],
)
def test_a_broken_scorer_gives_no_reward(end: ProcessEnd, source: RewardSource, why: str) -> None:
    with pytest.raises(RewardFailed, match=why):
        printed_reward(end, source)
