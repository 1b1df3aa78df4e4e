"""Is what is served what was trained? Sample tokens with their log-probabilities and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tracegrad_trainer.utils.network import http_client


class ProbeMismatchError(RuntimeError):
    """What is served is not what was trained: log-probabilities disagree."""


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """Tokens sampled from the served weights at temperature 1, with their log-probabilities."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # nats


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|served - trained| per token, in nats."""

    tokens: int
    mean: float
    max: float


def sample_probe(
    url: str,
    prompt_token_ids: Sequence[int],
    *,
    tokens: int = 32,
    seed: int | None = None,
    model: str = "policy",
    key: str | None = None,
    timeout: float = 60.0,
) -> ProbeSample:
    """Samples exactly `tokens` tokens after the prompt. `key`: of an engine that asks for one.
    httpx.HTTPError if the server does not answer."""
    request = {
        "model": model,
        "prompt": list(prompt_token_ids),
        "max_tokens": tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    with http_client(url, timeout_s=timeout, key=key) as client:
        response = client.post("/v1/completions", json=request)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    sample = ProbeSample(
        choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
    )
    assert sample.prompt_token_ids == list(prompt_token_ids), "the engine took the ids as given"
    assert len(sample.token_ids) == len(sample.logprobs), "one log-probability a token"
    return sample


def compare_logprobs(
    served: Sequence[float], trained: Sequence[float], tolerance: float
) -> LogprobGap:
    """The gap between two lists of log-probabilities (nats) of the same tokens.

    Raises ProbeMismatchError if the largest difference is above `tolerance` (nats) or not a number.
    """
    if len(served) != len(trained) or not served:
        raise ValueError(f"served: {len(served)} log-probabilities, trained: {len(trained)}")
    gaps = [abs(a - b) for a, b in zip(served, trained, strict=True)]
    gap = LogprobGap(len(gaps), math.fsum(gaps) / len(gaps), max(gaps))
    if not all(value <= tolerance for value in gaps):
        raise ProbeMismatchError(
            f"served and trained log-probabilities differ by up to {gap.max:.2g} nats "
            f"(mean {gap.mean:.2g}, allowed {tolerance:.2g})"
        )
    return gap
