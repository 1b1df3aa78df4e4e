"""pass@k: how often one of k attempts succeeds."""

from __future__ import annotations

import math


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """The probability that of `k` attempts, drawn of these without replacement, one succeeded: the
    unbiased estimator of Chen et al., "Evaluating large language models trained on code"
    (2107.03374), equation 1. Raises ValueError: there are fewer than k."""
    if not 0 < k <= attempts:
        raise ValueError(f"k: {k} of {attempts} attempts")
    if attempts - successes < k:
        return 1.0
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)
