"""Is what is served what was trained? Sample tokens with their log-probabilities and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad_trainer.losses.logprob_gap import BOUNDS, LogprobGap, Precision
from tracegrad_trainer.utils.network import http_client


class ProbeMismatchError(RuntimeError):
    """What is served is not what was trained: log-probabilities disagree, by `gap`."""

    def __init__(self, message: str, gap: LogprobGap) -> None:
        super().__init__(message)
        self.gap = gap


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """Tokens sampled from the served weights at temperature 1, with their log-probabilities."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # nats


def sample_probe(url: str, prompt_token_ids: Sequence[int], **options: Any) -> ProbeSample:
    """Of one prompt; as `sample_probes`."""
    [sample] = sample_probes(url, [prompt_token_ids], **options)
    return sample


def sample_probes(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 32,
    seed: int | None = None,
    model: str = "policy",
    key: str | None = None,
    timeout: float = 300.0,
    cache_salt: str | None = None,
) -> list[ProbeSample]:
    """Samples exactly `tokens` tokens after each of the prompts, all in one call, side by side.
    `key`: of an engine that asks for one. `cache_salt`: only what was cached for calls with this
    one is used; None: for calls without. httpx.HTTPError if the server does not answer."""
    request: dict[str, Any] = {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    if cache_salt is not None:
        request["cache_salt"] = cache_salt
    with http_client(url, timeout_s=timeout, key=key) as client:
        response = client.post("/v1/completions", json=request)
    response.raise_for_status()
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts), "one answer a prompt"
    return [_sample(choice, prompt) for choice, prompt in zip(choices, prompts, strict=True)]


def _sample(choice: dict[str, Any], prompt: Sequence[int]) -> ProbeSample:
    sample = ProbeSample(
        choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
    )
    assert sample.prompt_token_ids == list(prompt), "the engine took the ids as given"
    assert len(sample.token_ids) == len(sample.logprobs), "one log-probability a token"
    return sample


def compare_logprobs(
    served: Sequence[float], trained: Sequence[float], allowed: float | Precision
) -> LogprobGap:
    """The gap between two lists of log-probabilities (nats) of the same tokens.

    `allowed`: the largest difference of a token, nats, or the coarser one's precision of the two,
    whose bounds are held.

    Raises:
        ProbeMismatchError: it is more, or some difference is not a number.
    """
    if len(served) != len(trained) or not served:
        raise ValueError(f"served: {len(served)} log-probabilities, trained: {len(trained)}")
    gaps = [abs(a - b) for a, b in zip(served, trained, strict=True)]
    gap = LogprobGap.of(gaps)
    if isinstance(allowed, str):
        right, found = gap.within(BOUNDS[allowed]), gap.describe(BOUNDS[allowed])
        found += f": more than {allowed} rounds"
    else:
        right = gap.max <= allowed
        found = f"up to {gap.max:.2g} nats (mean {gap.mean:.2g}, allowed {allowed:.2g})"
    if not (right and all(map(math.isfinite, gaps))):
        raise ProbeMismatchError(f"served and trained log-probabilities differ by {found}", gap)
    return gap
