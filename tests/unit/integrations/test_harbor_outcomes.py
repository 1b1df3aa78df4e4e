"""Harbor's exceptions as outcomes: what is not the policy's doing is not scored as its own."""

from __future__ import annotations

import pytest

from tracegrad.events import Outcome
from tracegrad_integrations.harbor.outcomes import classify_trial


@pytest.mark.parametrize(
    ("failure", "calls", "serving", "outcome"),
    [
        (None, 3, None, "completed"),
        ("NonZeroAgentExitCodeError", 3, None, "agent_error"),
        ("NonZeroAgentExitCodeError", 0, None, "env_error"),
        ("NonZeroAgentExitCodeError", 3, "the last call failed", "infra_error"),
        ("AgentTimeoutError", 3, None, "budget"),
        ("AgentTimeoutError", 0, None, "infra_error"),
        ("AgentTimeoutError", 3, "the proxy is away", "infra_error"),
        ("HealthcheckError", 3, "the proxy is away", "env_error"),
        ("SomethingNew", 3, None, "infra_error"),
    ],
)
def test_outcomes(failure: str | None, calls: int, serving: str | None, outcome: str) -> None:
    named = None if failure is None else (failure, "said")
    found = classify_trial(named, calls, 0.0, serving)
    assert found.outcome is Outcome(outcome)
    assert serving is None or outcome != "infra_error" or serving in str(found.reason)


def test_a_verifier_without_a_reward_is_the_environments() -> None:
    assert classify_trial(None, 3, None).outcome is Outcome.ENV_ERROR
