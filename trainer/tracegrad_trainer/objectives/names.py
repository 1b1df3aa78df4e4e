"""The names of the parts there are: settings know them without the parts, which need torch."""

from __future__ import annotations

# By kind, which is the settings' field that chooses one. A registry takes exactly these.
PARTS: dict[str, tuple[str, ...]] = {
    "advantage": (
        "dr_grpo", "grpo", "rloo", "reinforce++", "opo", "max_rl",
        "running", "turn_return", "gigpo", "ipa", "gae",
    ),
    "ratio": ("token", "turn", "sequence", "product"),
    "surrogate": (
        "ppo", "cispo", "reinforce", "tis_surrogate", "topr", "decoupled_ppo", "minirl",
        "signed_prob_mask", "ipa", "sft", "dpo", "kto",
    ),
    "correction": ("tis", "mis", "reject", "none"),
    "correction_level": ("token", "turn", "sequence"),
    "aggregation": (
        "token_mean", "turn_mean", "rollout_mean", "sum_constant", "pair_mean", "row_mean",
    ),
}  # fmt: skip
