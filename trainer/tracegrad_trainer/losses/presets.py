"""Presets: objectives by name, as parts and their numbers.

A field that a preset does not name has the default that `ObjectiveSettings` prints. Where a paper
leaves a number out, the comment says what was chosen and why. Unless a paper has a correction of
its own, the mismatch between serving and training engine is weighed by w <= 2 at turn level. That
is the turn's geometric mean: it bounds the variance and corrects a mismatch that all tokens share,
and it hides single ones. A token 6 nats off in a turn of 200 makes w 1.03.
"""

from __future__ import annotations

from typing import Any

_TIS: dict[str, Any] = {"correction": "tis", "correction_level": "turn", "correction_cap": 2.0}
# The level stays for its diagnostics.
_UNCORRECTED: dict[str, Any] = {"correction": "none", "correction_level": "turn"}

_GRPO: dict[str, Any] = {
    "advantage": "grpo",
    "ratio": "token",
    "surrogate": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    **_TIS,
    "aggregation": "token_mean",
}
# No policy gradient: the advantage is not looked at.
_SUPERVISED: dict[str, Any] = {"advantage": "dr_grpo", "ratio": "token", **_UNCORRECTED}

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2402.03300, averaged over the step's tokens. Its KL (k3, 0.04) is off here: it costs a
    # second model, and what followed it went without.
    "grpo": _GRPO,
    # arXiv 2503.20783. The constant stands for the budget of sampled tokens; the paper's is its
    # longest answer. Under Adam it only scales what gradient clipping sees.
    "dr_grpo": _GRPO | {"advantage": "dr_grpo", "aggregation": "sum_constant", "constant": 1024.0},
    # arXiv 2503.14476: 16,384 tokens and 4,096 more over which the penalty rises to 1.
    "dapo": _GRPO
    | {
        "clip_high": 0.28,
        "overlong_budget": 20_480,
        "overlong_buffer": 4096,
        "overlong_penalty": 1.0,
    },
    # arXiv 2507.18071. Mismatch at the level of its ratio.
    "gspo": _GRPO
    | {
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "correction_level": "sequence",
        "aggregation": "rollout_mean",
    },
    # arXiv 2506.13585 does not say its bound; r <= 5 is what arXiv 2510.13786 (ScaleRL) settled on.
    "cispo": _GRPO | {"surrogate": "cispo", "clip_high": 4.0},
    # arXiv 2503.14286: the ratio is the whole rollout's, against the policy that sampled it.
    "topr": _GRPO
    | {"advantage": "dr_grpo", "ratio": "product", "surrogate": "topr", **_UNCORRECTED},
    # arXiv 1707.06347 with GAE (1506.02438), as used for language models: gamma 1, lambda 0.95.
    "ppo": _GRPO
    | {
        "advantage": "gae",
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "whiten": True,
        "value_coef": 0.5,
        "value_clip": 0.2,
    },
    # arXiv 2505.24298 (AReaL); tokens whose prox/mu exceeds 5 are left out, as in its code.
    "decoupled_ppo": _GRPO
    | {
        "surrogate": "decoupled_ppo",
        "prox": "old",
        "over_cap": "mask",
        **_UNCORRECTED,
        "correction_cap": 5.0,
    },
    # arXiv 2402.14740, with the clipped ratio of the whole sequence that TRL gives it.
    "rloo": _GRPO | {"advantage": "rloo", "ratio": "product", "aggregation": "rollout_mean"},
    # arXiv 2501.03262, with the group's mean as baseline; its advantage is whitened (`whitens`).
    "reinforce++": _GRPO | {"advantage": "reinforce++"},
    # arXiv 2505.23585: on-policy, so without a ratio.
    "opo": _GRPO | {"advantage": "opo", "surrogate": "reinforce"},
    # arXiv 2505.10978: gamma 0.95, both advantages weighed the same. Its KL is off, as in grpo.
    "gigpo": _GRPO
    | {"advantage": "gigpo", "gamma": 0.95, "turn_weight": 1.0, "aggregation": "rollout_mean"},
    # arXiv 2512.01374: tokens are added up, never divided by a length.
    "minirl": _GRPO
    | {
        "advantage": "dr_grpo",
        "surrogate": "minirl",
        "mask_low": 0.8,
        "mask_high": 1.27,
        **_UNCORRECTED,
        "correction_cap": 5.0,
        "aggregation": "sum_constant",
        "constant": 1.0,
    },
    # The ratio itself truncated at 1, as ROLL has it.
    "tis": _GRPO | {"surrogate": "tis_surrogate"},
    # prime-rl's loss: bounds on the change of a token's probability.
    "signed_prob_mask": _GRPO
    | {
        "advantage": "dr_grpo",
        "surrogate": "signed_prob_mask",
        "prob_bound": 0.2,
        "prob_penalty": 1e-3,
        **_UNCORRECTED,
    },
    # arXiv 2512.24873 publishes neither gamma nor H nor lambda nor a normaliser:
    # gamma 0.95 a turn, as its authors' code has for other returns by turn: a turn 13 before the
    # deciding one counts half. H = 2, our cap at turn level everywhere. Imitation 0.1: an expert's
    # prefix ten times as long as what is sampled after it then weighs the same. Rewards are not
    # centred, as published: failures (0) carry no gradient; `centre` makes them negative. The sum
    # over turns is divided by the step's tokens, which leaves its direction as published.
    "ipa": {
        "advantage": "ipa",
        "gamma": 0.95,
        "centre": False,
        "ratio": "turn",
        "surrogate": "ipa",
        "imitation": 0.1,
        "reinforcement": 1.0,
        "correction": "reject",
        "correction_level": "turn",
        "reject_stat": "ratio",
        "correction_floor": 0.0,
        "correction_cap": 2.0,
        "aggregation": "token_mean",
    },
    "sft": _SUPERVISED | {"surrogate": "sft", "aggregation": "token_mean"},
    # arXiv 2305.18290; 2402.01306.
    "dpo": _SUPERVISED | {"surrogate": "dpo", "beta": 0.1, "aggregation": "pair_mean"},
    "kto": _SUPERVISED | {"surrogate": "kto", "beta": 0.1, "aggregation": "label_mean"},
}
