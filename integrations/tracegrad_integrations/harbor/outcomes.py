"""How a trial of Harbor's ends, as a rollout's outcome. Nothing of Harbor's is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tracegrad.events import Outcome, is_reward
from tracegrad.runner.outcomes import Classified

# By the name of the exception's class, as Harbor's own table of errors has them: the agent's and
# the policy's doing.
_BUDGET = {
    "AgentTimeoutError", "ContextWindowExceededError", "ContextLengthExceededError",
    "OutputTokenExceededError", "OutputLengthExceededError",
}  # fmt: skip
_AGENT = {"NonZeroAgentExitCodeError", "AgentSafetyRefusalError", "ContentPolicyViolationError"}
# The task's and its image's: they fail again.
_ENVIRONMENT = {
    "SandboxBuildFailedError", "HealthcheckError", "AddTestsDirError", "DownloadVerifierDirError",
    "VerifierTimeoutError", "RewardFileNotFoundError", "RewardFileEmptyError",
    "VerifierOutputParseError", "BrokenEnvironment", "ServiceOperationsUnsupportedError",
}  # fmt: skip


def classify_trial(
    failure: tuple[str, str] | None,
    calls: int | None,
    reward: float | None,
    serving: str | None = None,
) -> Classified:
    """`failure`: the first exception's class and message. `calls`: LLM calls that the proxy has of
    it; None: of an agent without a model. `serving`: why the serving side is to blame, where it
    is. What is in no table is the machine's doing: it is never scored.

    An agent that fails before any call was never driven by the policy.
    """
    if failure is None:
        if reward is None:
            return Classified(Outcome.ENV_ERROR, "the verifier gave no reward")
        return Classified(Outcome.COMPLETED)
    name, message = failure
    said = f"{name}: {message}"[:1_000]
    if serving is not None and (name in _BUDGET or name in _AGENT):
        return Classified(Outcome.INFRA_ERROR, f"{said} ({serving})")
    if name in _BUDGET:
        if calls == 0:
            return Classified(Outcome.INFRA_ERROR, f"{said} (without one LLM call)")
        return Classified(Outcome.BUDGET, said)
    if name in _AGENT:
        if calls == 0:
            return Classified(Outcome.ENV_ERROR, f"{said} (before any LLM call)")
        return Classified(Outcome.AGENT_ERROR, said)
    if name in _ENVIRONMENT:
        return Classified(Outcome.ENV_ERROR, said)
    return Classified(Outcome.INFRA_ERROR, said)


def reward_of(rewards: Mapping[str, float | int] | None) -> float | None:
    """A task's reward: `reward`, or the only one that there is; None: unknown."""
    if not rewards:
        return None
    value = rewards.get("reward")
    if value is None and len(rewards) == 1:
        [value] = rewards.values()
    if value is None or not math.isfinite(value) or not is_reward(float(value)):
        return None
    return float(value)
