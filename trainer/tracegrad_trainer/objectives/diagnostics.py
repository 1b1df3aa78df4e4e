"""What is always logged, whatever objective is chosen.

Sums and maxima of one micro-batch, which add up over micro-batches and ranks; `summarise` makes
the step's metrics of the totals. Estimators of KL(mu || old) from tokens sampled by mu: k1 is
unbiased, k3 also and never negative (Schulman, "Approximating KL divergence").
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .objective import Evaluated
from .tokens import Tokens, log_ratio, turn_mean

# Lag behind the current policy, in versions; the last holds everything older.
GAPS = (0, 1, 2, 3, 4)


def sums(tokens: Tokens, done: Evaluated, entropy: Tensor, version: int) -> dict[str, Tensor]:
    """Scalars that add up. Entries of `entropy` [n] are of the current policy."""
    log_w = log_ratio(tokens.old, tokens.mu)
    k3 = torch.expm1(log_w) - log_w
    moved = done.log_ratio
    w = done.log_w.exp()
    gap = (version - tokens.version).clamp(0, GAPS[-1])
    difference = (tokens.old - tokens.mu).abs()
    values = {
        "loss": done.total.detach(),
        "units": done.units,
        "tokens": tokens.mu.new_tensor(float(len(tokens))),
        "turns": tokens.mu.new_tensor(float(tokens.turns)),
        "entropy": entropy.sum(),
        "k1": -log_w.sum(),
        "k3": k3.sum(),
        "w": w.sum(),
        "w_squared": (w * w).sum(),
        "policy_k3": (torch.expm1(moved) - moved).sum(),
        "clipped": done.clipped.sum(),
        "corrected": done.corrected.sum(),
        "staleness": (version - tokens.version).sum(),
    }
    for g in GAPS:
        here = gap == g
        values[f"tokens_gap_{g}"] = here.sum()
        values[f"difference_gap_{g}"] = difference[here].sum()
        values[f"k3_gap_{g}"] = k3[here].sum()
    return values


def maxima(tokens: Tokens, done: Evaluated, version: int) -> dict[str, Tensor]:
    """Scalars whose maximum is kept; all are at least 0, so an empty micro-batch says 0."""
    log_w = log_ratio(tokens.old, tokens.mu)
    on_policy = (tokens.old - tokens.mu).abs() * (tokens.version == version)
    return {
        "gap_max": _max(on_policy),
        "max_w": _max(log_w.exp()),
        "turn_max_w": _max(turn_mean(log_w, tokens.turn, tokens.turns).exp()),
        "ratio_max": _max(done.log_ratio.exp()),
        "staleness_max": _max((version - tokens.version).to(torch.float32)),
    }


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def summarise(total: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the step from the totals over all micro-batches and ranks.

    `gap_mean`, `gap_max`: |log old - log mu| over tokens sampled by the current version: what
    the two engines disagree about, apart from any change of the policy.
    """
    n = max(total["tokens"], 1.0)
    metrics = {
        "loss": total["loss"] / max(total["units"], 1.0),
        "entropy": total["entropy"] / n,
        "gap_mean": total["difference_gap_0"] / max(total["tokens_gap_0"], 1.0),
        "gap_tokens": total["tokens_gap_0"],
        "k1": total["k1"] / n,
        "k3": total["k3"] / n,
        "ess": total["w"] ** 2 / (n * total["w_squared"]) if total["w_squared"] else 0.0,
        "clipped_share": total["clipped"] / n,
        "corrected_share": total["corrected"] / n,
        "policy_k3": total["policy_k3"] / n,
        "tokens_trained": total["tokens"],
        "turns_trained": total["turns"],
        "staleness_mean": total["staleness"] / n,
        **largest,
    }
    for g in GAPS:
        if count := total[f"tokens_gap_{g}"]:
            metrics[f"tokens_gap_{g}"] = count
            metrics[f"difference_gap_{g}"] = total[f"difference_gap_{g}"] / count
            metrics[f"k3_gap_{g}"] = total[f"k3_gap_{g}"] / count
    return metrics
