"""The names of the parts there are, and the settings that each reads: settings know them without
the parts, which need torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Reads = tuple[str, ...]

# Of a rollout's reward.
_REWARD: Reads = ("judge", "overlong_budget", "whiten")
# Of a policy gradient.
_POLICY: Reads = ("advantage", "correction", "kl", "aggregation", "entropy_coef")
_CLIP: Reads = ("clip_low", "clip_high", "dual_clip")

# By kind, which is the settings' field that chooses one. A registry takes exactly these names.
PARTS: dict[str, dict[str, Reads]] = {
    "advantage": {
        "dr_grpo": _REWARD,
        "grpo": _REWARD,
        "rloo": _REWARD,
        "reinforce++": ("judge", "overlong_budget"),  # whitened anyway
        "opo": _REWARD,
        "max_rl": _REWARD,
        "running": (*_REWARD, "running_decay"),
        "turn_return": (*_REWARD, "gamma"),
        "gigpo": (*_REWARD, "gamma", "turn_weight"),
        "ipa": (*_REWARD, "gamma", "centre", "deciding_turn", "imitation"),
        "gae": (
            *("judge", "whiten", "gamma", "gae_lambda", "gae_level"),
            *("value_coef", "value_clip"),
        ),
    },
    "ratio": {"token": (), "turn": (), "sequence": (), "product": ()},
    "surrogate": {
        "ppo": (*_POLICY, "ratio", *_CLIP),
        "cispo": (*_POLICY, "ratio", "clip_high"),
        "reinforce": _POLICY,
        "tis_surrogate": (*_POLICY, "ratio"),
        "topr": (*_POLICY, "ratio"),
        "decoupled_ppo": (*_POLICY, "ratio", *_CLIP, "prox", "over_cap", "correction_cap"),
        "minirl": (*_POLICY, "ratio", "mask_low", "mask_high", "correction_cap"),
        "signed_prob_mask": (*_POLICY, "prob_bound", "prob_penalty"),
        "ipa": (*_POLICY, "ratio", "imitation", "reinforcement"),
        "sft": ("kl", "aggregation", "correction"),  # which must be none
        "dpo": ("aggregation", "correction", "beta"),
        "kto": ("aggregation", "correction", "beta"),
    },
    "correction": {
        "tis": ("correction_level", "correction_cap"),
        "mis": ("correction_level", "correction_cap", "correction_floor"),
        "reject": ("correction_level", "correction_cap", "correction_floor", "reject_stat"),
        "none": (),
    },
    "correction_level": {
        "token": (),
        "turn": (),
        "sequence": (),
        "turn_product": (),
        "sequence_product": (),
    },
    "aggregation": {
        "token_mean": (),
        "turn_mean": (),
        "rollout_mean": (),
        "group_mean": (),
        "sum_constant": ("constant",),
        "pair_mean": (),
        "label_mean": (),
    },
}
# Of settings that are no parts: what is read where they are this, and where they are set at all.
CHOICES: dict[str, dict[str, Reads]] = {
    "kl": {"none": (), "k1": ("kl_coef",), "k2": ("kl_coef",), "k3": ("kl_coef",)},
    "prox": {"old": (), "interpolated": ("prox_weight",)},
}
WHERE_SET: dict[str, Reads] = {
    "kl_coef": ("kl_unbiased",),
    "entropy_coef": ("entropy_target",),
    "entropy_target": ("entropy_rate",),
    "overlong_budget": ("overlong_buffer", "overlong_penalty"),
}
# Advantages that compare a group's rollouts: 0 for one that is alone, and for all of equal rewards.
GROUP_RELATIVE = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce++", "opo", "max_rl", "turn_return", "gigpo"}
)
# Surrogates of whole rollouts against a reference, or of texts: no policy gradient.
PREFERENCES = ("dpo", "kto")
SUPERVISED = (*PREFERENCES, "sft")
LEARN_FROM_DEMONSTRATIONS = (*SUPERVISED, "ipa")
# Surrogates that weigh tokens by pi/mu themselves, and corrections that are such weights.
USE_ROLLOUT_LOGPROBS = ("topr", "decoupled_ppo", "minirl", "signed_prob_mask")
WEIGHTS = ("tis", "mis")
# Of a surrogate of the user's own, whatever else it reads.
OF_ANY_SURROGATE: Reads = (*_POLICY, "ratio")
# Whoever asks for a loss.
ROOT: Reads = ("preset", "surrogate")


def settings_read_by(field: str, value: Any) -> Reads:
    """The settings that are read where `field` has this value; of no part of the user's own."""
    of_value = (PARTS | CHOICES).get(field, {})
    return of_value[value] if of_value else WHERE_SET.get(field, ()) if value else ()


def readers_of(field: str) -> list[str]:
    """What reads the setting, in words."""
    found = [
        f"{name} {value!r}"
        for name, values in (PARTS | CHOICES).items()
        for value, read in values.items()
        if field in read
    ]
    return found + [name for name, read in WHERE_SET.items() if field in read]


def used_settings(settings: Mapping[str, Any], own: Mapping[str, Reads]) -> frozenset[str]:
    """The settings that something reads; `own`: what the user's parts read, by their paths."""
    found: set[str] = set()
    waiting = list(ROOT)
    while waiting:
        field = waiting.pop()
        if field in found:
            continue
        found.add(field)
        value = settings[field]
        waiting += own[value] if field in PARTS and value in own else settings_read_by(field, value)
    return frozenset(found)
