"""pass@k: how often one of k attempts succeeds.

`tracegrad rollouts pass`, `tracegrad run` and `tracegrad.run` all say it by these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

SUCCESS = 0.5  # a reward from here on is one, where nobody says otherwise


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """The probability that of `k` attempts, drawn of these without replacement, one succeeded: the
    unbiased estimator of Chen et al., "Evaluating large language models trained on code"
    (2107.03374), equation 1. Raises ValueError: there are fewer than k."""
    if not 0 < k <= attempts:
        raise ValueError(f"k: {k} of {attempts} attempts")
    if attempts - successes < k:
        return 1.0
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def mean_pass_at_k(
    groups: Iterable[Sequence[float]], k: int, *, success: float = SUCCESS
) -> float | None:
    """The mean of `pass_at_k` over tasks, so that all of them count alike.

    Args:
        groups: rewards of attempts, a task each; of those with fewer than k nothing is known.
        success: a reward from here on is one.

    None: there is no task with k rewards.
    """
    found = [
        pass_at_k(len(rewards), sum(reward >= success for reward in rewards), k)
        for rewards in groups
        if len(rewards) >= k
    ]
    return math.fsum(found) / len(found) if found else None
