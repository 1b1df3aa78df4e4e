"""Every metric of a step: its name, its unit and its meaning. docs/metrics.md has this table.

Names are those of `StepRecord.metrics`. A name that ends in … stands for several: `skipped_…` for
one a reason, `k3_lag_…` for one a version of lag, `seconds/…` for the table `seconds`, which is
flat everywhere but in the store.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS = "seconds/"
SKIPPED = "skipped_"


@dataclass(frozen=True, slots=True)
class Metric:
    unit: str
    what: str
    clock: bool = False  # by how fast the machine was, so it differs in another run of the step


SECTIONS: dict[str, dict[str, Metric]] = {
    "The batch": {
        "reward_mean": Metric("reward", "mean over the rollouts"),
        "reward_std": Metric("reward", "deviation over the rollouts"),
        "group_spread": Metric("reward", "deviation within a group, mean over the groups"),
        "groups": Metric("groups", "of the batch"),
        "groups_equal_reward": Metric("groups", "whose rewards are all equal: no signal"),
        "groups_trained": Metric("groups", "with at least one turn that is trained"),
        "rollouts": Metric("rollouts", "of the batch"),
        "rewards_after_training": Metric(
            "rewards", "since the step before, whose rollouts had been trained or skipped by then"
        ),
        "scored_…": Metric("rollouts", "since the step before, that this scorer scored"),
        "score_unknown_…": Metric("rollouts", "of which it could not tell"),
        "score_failed_…": Metric("rollouts", "that it failed with, after all attempts"),
        "score_seconds_…": Metric(
            "s", "that it took for these, with the pauses between attempts", clock=True
        ),
        "advantage_abs_mean": Metric("advantage", "mean size over the turns"),
        "turns": Metric("turns", "of the batch"),
        "turns_skipped": Metric("turns", "of the batch, not trained for any reason"),
        "skipped_…": Metric("turns", "of the batch, not trained for this reason"),
        "drift_alarms": Metric("alarms", "of guards, since the step before"),
        "drift_evidence": Metric(
            "share", "of what an alarm needs, largest of all guards; from 1 on with an alarm"
        ),
        "states_given": Metric("turns", "whose environment state the agent or environment named"),
        "states_observed": Metric("turns", "whose state is what was observed last"),
        "states_unknown": Metric("turns", "whose state is not known: equal to no other"),
        "paths": Metric("paths", "that lead to the last trained turns"),
        "forks": Metric("paths", "beyond a rollout's first"),
        "rows": Metric("rows", "that the turns were laid out in"),
        "rows_tree": Metric("rows", "that are trees, whose branches share what they begin with"),
        "trees_too_long": Metric("trees", "that were laid out as paths: too long for a row"),
        "row_tokens": Metric("tokens", "of all rows: what the model reads"),
        "row_tokens_longest": Metric("tokens", "of the longest row"),
        "tokens_saved": Metric("tokens", "that paths would have had more than trees"),
        "target_tokens": Metric("tokens", "of the rows that are trained"),
        "target_share": Metric("share", "of the rows' tokens that are trained"),
        "expert_routing_known_share": Metric(
            "share", "of row_tokens whose experts the engine reported (r3)"
        ),
        "micro_batches": Metric("forwards", "of a rank"),
        "pack_fill": Metric("share", "of the token budgets that rows fill"),
        "pack_balance": Metric("share", "of the ranks' time that none waits for another"),
        "ranks_a_micro_batch": Metric("ranks", "that share its tokens"),
    },
    "The step": {
        "loss": Metric("loss", "all terms, over the objective's denominator"),
        "policy_loss": Metric("loss", "the surrogate's part"),
        "kl_loss": Metric("loss", "the part of the KL to the reference"),
        "value_loss": Metric("loss", "the value head's part"),
        "entropy_loss": Metric("loss", "the entropy bonus's part, 0 or below"),
        "entropy_coef": Metric("1", "coefficient of the bonus in the last update"),
        "grad_norm": Metric("norm", "of the gradient before clipping"),
        "step_share": Metric(
            "share", "of a whole step that it counts for: `groups_trained` of those wanted"
        ),
        "lr": Metric("rate", "learning rate of the step, of its last update, times `step_share`"),
        "value_lr": Metric("rate", "learning rate of the value head, likewise"),
        "updates_value_only": Metric("updates", "in which the value head alone learnt (warm-up)"),
        "updates": Metric("updates", "of the weights, on this batch"),
        "updates_skipped": Metric("updates", "left out: loss or gradient was not finite"),
        "entropy": Metric("nats", "of the policy at the trained tokens, mean"),
        "tokens_trained": Metric("tokens", "that carried the loss, in all passes"),
        "turns_trained": Metric("turns", "that carried the loss, in all passes"),
        "demonstration_tokens": Metric("tokens", "of these, that an expert wrote"),
        "no_signal_share": Metric("share", "of sampled tokens whose advantage is 0"),
        "rows_dropped": Metric("rows", "that left the step: their numbers were not finite"),
        "step_skipped": Metric("0 or 1", "1: the weights were left as they were"),
        "policy_k3": Metric("nats", "k3 of the policy against the batch's start, mean"),
        "ratio_max": Metric("ratio", "largest ratio to the batch's start"),
        "clipped_share": Metric("share", "of tokens that the surrogate's clip or mask holds"),
        "clipped_turn_share": Metric("share", "of turns with such a token"),
        "kl_reference": Metric("nats", "k3 of the policy against the reference, mean"),
        "kl_reference_k1": Metric("nats", "k1 of the same"),
        "chosen_gain": Metric("nats", "log pi - reference of chosen rollouts, mean"),
        "rejected_gain": Metric("nats", "log pi - reference of rejected rollouts, mean"),
        "pair_accuracy": Metric("share", "of pairs whose chosen row gained more"),
        "explained_variance": Metric("share", "of the returns' variance, by the value head"),
    },
    "Serving engine against training engine": {
        "k1": Metric("nats", "k1 estimate of KL(mu || old), mean over tokens"),
        "k3": Metric("nats", "k3 estimate of KL(mu || old), mean over tokens"),
        "ess": Metric("share", "effective sample size of the weights old/mu"),
        "max_w": Metric("ratio", "largest old/mu of a token"),
        "turn_max_w": Metric("ratio", "largest old/mu of a turn (geometric mean)"),
        "product_max_w": Metric("ratio", "largest product of old/mu over a turn's tokens"),
        "product_ess": Metric("share", "effective sample size of the turns' products of old/mu"),
        "weight_ess": Metric(
            "share", "effective sample size of the correction's weights, one a unit of its level"
        ),
        "weight_variance": Metric("1", "variance of the same weights, as they were applied"),
        "corrected_share": Metric("share", "of tokens whose weight the correction changed"),
        "corrected_turn_share": Metric("share", "of turns with such a token"),
        "masked_share": Metric("share", "of tokens that the correction took out"),
        "masked_turn_share": Metric("share", "of turns with such a token"),
        "gap_mean": Metric("nats", "|log old - log mu|, tokens of the current version, mean"),
        "gap_p50": Metric("nats", "of the same, median (to 9 %)"),
        "gap_p99": Metric("nats", "of the same, 99 % quantile (to 9 %)"),
        "gap_max": Metric("nats", "|log old - log mu|, tokens of the current version, largest"),
        "gap_tokens": Metric("tokens", "that the current version sampled"),
        "gap_p50_bound": Metric(
            "nats", "what `gap_p50` may be, by the coarser dtype of the two engines"
        ),
        "mismatch": Metric("0 or 1", "1: the gap is more than rounding"),
        "push/gap_mean": Metric("nats", "of the check after a push, mean"),
        "push/gap_p50": Metric("nats", "of the check after a push, median"),
        "push/gap_p99": Metric("nats", "of the check after a push, 99 % quantile"),
        "push/gap_max": Metric("nats", "of the check after a push, largest"),
        "push/failed": Metric("0 or 1", "1: the push failed, the version before is served"),
    },
    "Staleness": {
        "staleness_mean": Metric("versions", "current version less the token's, mean"),
        "staleness_max": Metric("versions", "current version less the token's, largest"),
        "sampled_tokens": Metric("tokens", "of the batch that were sampled, trained or not"),
        "lag_share_…": Metric("share", "of those, that lag so many versions (8: 8 and more)"),
        "stale_token_share": Metric(
            "share",
            "of the batch's sampled tokens, too old to be trained (`batches.max_staleness`)",
        ),
        "intake_places": Metric(
            "rollouts", "that drivers were told to open since the step before", clock=True
        ),
        "intake_waited_s": Metric(
            "s", "that the drivers waited for these, one after the other", clock=True
        ),
        "tokens_lag_…": Metric("tokens", "that lag so many versions (4: 4 and more)"),
        "difference_lag_…": Metric("nats", "|log old - log mu| of those, mean"),
        "k1_lag_…": Metric("nats", "k1 of those, mean"),
        "k3_lag_…": Metric("nats", "k3 of those, mean"),
        "clipped_lag_…": Metric("share", "of those that the clip holds"),
        "policy_version": Metric("version", "that the step's weights became"),
    },
    "Time": {
        "seconds/…": Metric("s", "by stage: start, wait, train, checkpoint, …", clock=True),
        "push/seconds": Metric("s", "that a push took", clock=True),
        "push/seconds/…": Metric("s", "of it, by stage: write, load, verify, …", clock=True),
        "push/paused_s": Metric(
            "s", "of it, that the engine made no token; not where it slept", clock=True
        ),
        "push/held_s": Metric(
            "s", "of it, that new calls waited; not where the engine slept", clock=True
        ),
        "push/bytes": Metric("bytes", "that a push brought to the engine"),
        "tokens": Metric("tokens", "that all forwards of the step read"),
        "flops": Metric("flop", "of the step, forward and backward"),
        "tokens_per_second": Metric("tokens/s", "`tokens` over the time of training", clock=True),
        "mfu": Metric("share", "of the hardware's peak, where it is known", clock=True),
        "memory_peak": Metric("bytes", "that rank 0 took at most on its GPU", clock=True),
    },
}

METRICS: dict[str, Metric] = {
    name: one for section in SECTIONS.values() for name, one in section.items()
}


def find_metric(name: str) -> Metric | None:
    """Of `skipped_stale`, `k3_lag_2` and `seconds/train` too."""
    if name in METRICS:
        return METRICS[name]
    families = (known[:-1] for known in METRICS if known.endswith("…"))
    return next((METRICS[f"{one}…"] for one in families if name.startswith(one)), None)
