"""What is always logged, whatever objective is chosen.

Sums and maxima of one micro-batch, which add up over micro-batches and ranks;
`summarise_diagnostics` makes the step's metrics of the totals. Estimators of KL(mu || old) from
tokens sampled by mu: k1 is unbiased, k3 also and never negative (Schulman, "Approximating KL
divergence"). An expert's tokens were sampled by no policy: of ratios and mismatch they are no part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tracegrad_trainer.losses.logprob_gap import BINS, BINS_PER_OCTAVE, HIGHEST_GAP, LOWEST_GAP
from tracegrad_trainer.losses.loss import LossOutput
from tracegrad_trainer.losses.tokens import (
    LOG_RATIO_LIMIT,
    PerToken,
    TokenMask,
    Tokens,
    log_mismatch,
    log_ratio,
    pairs_of_tokens,
    segment_mean,
    segment_sum,
)

# Lag behind the current policy, in versions; the last holds everything older.
LAGS = (0, 1, 2, 3, 4)


def diagnostic_sums(
    tokens: Tokens, done: LossOutput, entropy: PerToken, version: int
) -> dict[str, Tensor]:
    """Scalars that add up. Entries of `entropy` are of the current policy.

    Tokens are picked by products and not by indices, for which a host would wait for its device.
    """
    sampled = tokens.sampled
    log_w = log_mismatch(tokens)
    moved = done.log_ratio
    w = done.log_w.exp() * sampled
    values = {
        "loss": done.total.detach(),
        "policy_loss": done.policy,
        "kl_loss": done.kl,
        "value_loss": done.value,
        "entropy_loss": done.entropy,
        "units": done.units,
        "tokens": tokens.rollout_logprobs.new_tensor(float(len(tokens))),
        "turns": tokens.rollout_logprobs.new_tensor(float(tokens.turns)),
        "sampled": sampled.sum(),
        "sampled_turns": _turns_with(sampled, tokens),
        "entropy": entropy.sum(),
        "entropy_sampled": (entropy * sampled).sum(),
        "k1": -log_w.sum(),
        "k3": _k3(log_w).sum(),
        "w": w.sum(),
        "w_squared": (w * w).sum(),
        **_of_weights(done.weight, done.unit * sampled),
        **_of_products(log_w, tokens),
        "policy_k3": (_k3(moved) * sampled).sum(),
        "no_signal": (sampled & (tokens.advantage == 0)).sum(),
        "staleness": ((version - tokens.version) * sampled).sum(),
    }
    for name in ("clipped", "corrected", "masked"):
        touched = getattr(done, name) & sampled
        values[name] = touched.sum()
        values[f"{name}_turns"] = _turns_with(touched, tokens)
    values |= _by_lag(tokens, done, log_w, version)
    if tokens.reference_logprobs is not None:
        values |= _to_reference(tokens, tokens.reference_logprobs)
    if done.values is not None and tokens.returns is not None:
        values |= _of_values(done.values, tokens.returns, sampled)
    return values


def _of_weights(weight: PerToken, unit: PerToken) -> dict[str, Tensor]:
    """Moments of the weights that the correction gave, each counted once for what has it."""
    once = weight.double() * unit
    return {"weighted": unit.sum(), "weights": once.sum(), "weights_squared": (once * weight).sum()}


def _of_products(log_w: PerToken, tokens: Tokens) -> dict[str, Tensor]:
    """Moments of the turns' products of old/mu, whatever level corrects."""
    here = segment_sum(tokens.sampled.to(log_w.dtype), tokens.turn, tokens.turns) > 0
    product = _products(log_w, tokens) * here
    return {"products": product.sum(), "products_squared": (product * product).sum()}


def _products(log_w: PerToken, tokens: Tokens) -> Float[Tensor, " turns"]:
    total = segment_sum(log_w, tokens.turn, tokens.turns)
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().double()


def _by_lag(tokens: Tokens, done: LossOutput, log_w: PerToken, version: int) -> dict[str, Tensor]:
    lag = (version - tokens.version).clamp(0, LAGS[-1])
    difference, k3 = (tokens.old_logprobs - tokens.rollout_logprobs).abs(), _k3(log_w)
    values = {}
    for g in LAGS:
        here = (lag == g) & tokens.sampled
        values[f"tokens_lag_{g}"] = here.sum()
        values[f"difference_lag_{g}"] = (difference * here).sum()
        values[f"k1_lag_{g}"] = -(log_w * here).sum()
        values[f"k3_lag_{g}"] = (k3 * here).sum()
        values[f"clipped_lag_{g}"] = (done.clipped & here).sum()
    return values


def _to_reference(tokens: Tokens, reference: PerToken) -> dict[str, Tensor]:
    log_moved = log_ratio(tokens.policy_logprobs.detach(), reference)
    gain, label = tokens.policy_logprobs.detach() - reference, tokens.label[tokens.row]
    chosen, rejected = label == 1, label == -1
    pairs = pairs_of_tokens(tokens)
    margin = segment_sum(pairs.side * gain, pairs.of_token, tokens.rows)
    return {
        "reference_k1": (log_moved * tokens.sampled).sum(),
        "reference_k3": (_k3(-log_moved) * tokens.sampled).sum(),
        "chosen": (chosen / tokens.rollout_tokens).sum(),
        "rejected": (rejected / tokens.rollout_tokens).sum(),
        "chosen_gain": (gain * chosen).sum(),
        "rejected_gain": (gain * rejected).sum(),
        "pairs": pairs.whole.sum(),
        "pairs_right": (pairs.whole & (margin > 0)).sum(),
    }


def _of_values(value: PerToken, returns: PerToken, sampled: TokenMask) -> dict[str, Tensor]:
    # Variances are differences of these: in double, or little is left of them.
    wanted = returns.double() * sampled
    error = (returns.double() - value.double()) * sampled
    return {
        "valued": sampled.sum(),
        "returns": wanted.sum(),
        "returns_squared": (wanted * wanted).sum(),
        "value_error": error.sum(),
        "value_error_squared": (error * error).sum(),
    }


def diagnostic_maxima(tokens: Tokens, done: LossOutput, version: int) -> dict[str, Tensor]:
    """Scalars whose maximum is kept; all are at least 0, so an empty micro-batch gives 0."""
    sampled = tokens.sampled
    log_w = log_mismatch(tokens)
    by_turn = segment_mean(log_w, tokens.turn, tokens.turns, sampled)[tokens.turn]
    on_policy = (tokens.old_logprobs - tokens.rollout_logprobs).abs() * (
        sampled & (tokens.version == version)
    )
    return {
        "gap_max": _max(on_policy),
        "max_w": _max(log_w.exp() * sampled),
        "turn_max_w": _max(by_turn.exp() * sampled),
        "product_max_w": _max(_products(log_w, tokens)[tokens.turn] * sampled),
        "ratio_max": _max(done.log_ratio.exp() * sampled),
        "staleness_max": _max(((version - tokens.version) * sampled).to(torch.float32)),
    }


def gap_histogram(tokens: Tokens, version: int) -> Float64[Tensor, " bins"]:
    """How many tokens of the current version lie in which bin of |log old - log mu|: counts add
    up, quantiles do not (`binned_quantile`)."""
    gap = (tokens.old_logprobs - tokens.rollout_logprobs).abs().double().nan_to_num()
    # Rows that are not finite leave the step later; their place must be one of the bins as well.
    octaves = (gap.clamp(LOWEST_GAP, HIGHEST_GAP) / LOWEST_GAP).log2()
    place = (octaves * BINS_PER_OCTAVE).ceil().long().clamp(max=BINS - 1)
    here = tokens.sampled & (tokens.version == version)
    return gap.new_zeros(BINS).index_add(0, place, here.double())


def _max(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def _k3(log_ratios: PerToken) -> PerToken:
    return torch.expm1(log_ratios) - log_ratios


def _turns_with(touched: TokenMask, tokens: Tokens) -> Tensor:
    return (
        segment_sum(touched.to(tokens.rollout_logprobs.dtype), tokens.turn, tokens.turns) > 0
    ).sum()


def summarise_diagnostics(
    total: Mapping[str, float], largest: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of the step from the totals over all micro-batches and ranks.

    `gap_mean`, `gap_max`: |log old - log mu| over tokens sampled by the current version: what
    the two engines disagree about, apart from any change of the policy. Shares of tokens and of
    turns are of the sampled ones.
    """
    n, turns = max(total["sampled"], 1.0), max(total["sampled_turns"], 1.0)
    units = total["units"]
    metrics = {
        name: total[name] / units if units else 0.0
        for name in ("loss", "policy_loss", "kl_loss", "value_loss", "entropy_loss")
    }
    metrics |= {
        "entropy": total["entropy"] / max(total["tokens"], 1.0),
        "gap_mean": total["difference_lag_0"] / max(total["tokens_lag_0"], 1.0),
        "gap_tokens": total["tokens_lag_0"],
        "k1": total["k1"] / n,
        "k3": total["k3"] / n,
        "ess": _ess(total["w"], total["w_squared"], n),
        "product_ess": _ess(total["products"], total["products_squared"], turns),
        **_weights(total),
        "policy_k3": total["policy_k3"] / n,
        "no_signal_share": total["no_signal"] / n,
        "tokens_trained": total["tokens"],
        "turns_trained": total["turns"],
        "demonstration_tokens": total["tokens"] - total["sampled"],
        "staleness_mean": total["staleness"] / n,
        **largest,
    }
    for name in ("clipped", "corrected", "masked"):
        metrics[f"{name}_share"] = total[name] / n
        metrics[f"{name}_turn_share"] = total[f"{name}_turns"] / turns
    for g in LAGS:
        if count := total[f"tokens_lag_{g}"]:
            metrics[f"tokens_lag_{g}"] = count
            for name in ("difference", "k1", "k3", "clipped"):
                metrics[f"{name}_lag_{g}"] = total[f"{name}_lag_{g}"] / count
    return metrics | _of_reference(total, n) | _explained(total)


def _ess(added: float, squared: float, n: float) -> float:
    """The effective sample size of n weights, as a share of n."""
    return added**2 / (n * squared) if squared else 0.0


def _weights(total: Mapping[str, float]) -> dict[str, float]:
    """Of the correction's weights, as they were applied."""
    n = total["weighted"]
    mean, square = (total[name] / n if n else 0.0 for name in ("weights", "weights_squared"))
    return {
        "weight_ess": _ess(total["weights"], total["weights_squared"], n),
        "weight_variance": max(0.0, square - mean**2),
    }


def _of_reference(total: Mapping[str, float], n: float) -> dict[str, float]:
    """KL(pi || reference) a token; of preferences how much likelier than there a rollout became."""
    if "reference_k3" not in total:
        return {}
    metrics = {
        "kl_reference": total["reference_k3"] / n,
        "kl_reference_k1": total["reference_k1"] / n,
    }
    for side in ("chosen", "rejected"):
        if total[side]:
            metrics[f"{side}_gain"] = total[f"{side}_gain"] / total[side]
    if total["pairs"]:
        metrics["pair_accuracy"] = total["pairs_right"] / total["pairs"]
    return metrics


def _explained(total: Mapping[str, float]) -> dict[str, float]:
    """1 - Var(R - v) / Var(R) of the value head; 0 where all returns are the same."""
    if "valued" not in total:
        return {}
    n = max(total["valued"], 1.0)
    spread = total["returns_squared"] / n - (total["returns"] / n) ** 2
    left = total["value_error_squared"] / n - (total["value_error"] / n) ** 2
    return {"explained_variance": 1 - left / spread if spread > 1e-12 else 0.0}
