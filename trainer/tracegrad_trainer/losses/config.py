"""The objective's settings: a preset fills what is not given, and everything is printable."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tracegrad.import_path import is_import_path
from tracegrad_trainer.losses.compatibility import (
    HIGHEST_ENTROPY_COEF,
    LOWEST_ENTROPY_COEF,
    check_compatible,
    custom_part_reads,
)
from tracegrad_trainer.losses.judge import load_judge
from tracegrad_trainer.losses.part_names import (
    GROUP_RELATIVE,
    LEARN_FROM_DEMONSTRATIONS,
    PARTS,
    SUPERVISED,
    USE_ROLLOUT_LOGPROBS,
    used_settings,
)
from tracegrad_trainer.losses.presets import PRESETS
from tracegrad_trainer.losses.registry import check_part

Need = Literal["reference", "value", "kto_z"]


class ObjectiveSettings(BaseModel):
    """loss = AGG( W(w) * S(ratio, A, log pi) ) + kl_coef * KL + value_coef * V - entropy_coef * H,
    parts by name.

    A part's name may also be an import path, `package.module:function`: a user's own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str = Field("grpo", description="fills every field that is not given")
    options: dict[str, Any] = Field({}, description="for parts of your own: whatever they read")

    judge: str | None = Field(
        None, description="package.module:function that rewards a group's rollouts by comparing"
    )
    advantage: str = Field("", description="how a turn's advantage comes from rewards")
    gamma: float = Field(
        1.0, gt=0, le=1, description="discount a turn (gae at level token: a token)"
    )
    gae_lambda: float = Field(0.95, ge=0, le=1, description="gae: of what follows, as gamma")
    gae_level: Literal["token", "turn"] = Field(
        "token", description="gae: values and advantages of tokens or of whole turns"
    )
    turn_weight: float = Field(1.0, ge=0, description="gigpo: of the turn's advantage")
    running_decay: float = Field(0.95, gt=0, lt=1, description="running: of the mean, a rollout")
    centre: bool = Field(False, description="ipa: returns of R - mean of the group, not of R")
    deciding_turn: Literal["marked", "rewarded", "last"] = Field(
        "marked",
        description="ipa: the turn that distances count to: the one that a reward named"
        " 'deciding' is for, the last one with a reward above 0, or the rollout's last; the last"
        " where there is no such turn",
    )

    ratio: str = Field("", description="over what pi/old is taken")
    surrogate: str = Field("", description="what is minimised at each token")
    clip_low: float = Field(
        0.2, ge=0, lt=1, description="ratios below 1 - clip_low have no gradient where A < 0"
    )
    clip_high: float = Field(
        0.2, ge=0, description="ratios above 1 + clip_high have no gradient where A > 0"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="a token of A < 0 costs at most this times -A; none: no bound"
    )
    prox: Literal["old", "interpolated"] = Field(
        "old", description="decoupled_ppo: a forward, or between mu and pi"
    )
    prox_weight: float = Field(0.5, ge=0, le=1, description="interpolated: share of pi, in logs")
    over_cap: Literal["mask", "clamp"] = Field(
        "mask",
        description="decoupled_ppo: a token whose prox/mu exceeds correction_cap weighs 0, or the"
        " cap",
    )
    mask_low: float = Field(0.8, ge=0, description="minirl: smallest ratio of a bad token")
    mask_high: float = Field(1.27, ge=1, description="minirl: largest ratio of a good token")
    prob_bound: float = Field(0.2, gt=0, description="signed_prob_mask: largest p_pi - p_mu")
    prob_penalty: float = Field(1e-3, ge=0, description="signed_prob_mask: of (log pi/mu)^2")
    imitation: float = Field(0.0, ge=0, description="ipa: weight of an expert's tokens")
    reinforcement: float = Field(1.0, ge=0, description="ipa: weight of sampled tokens")
    beta: float = Field(0.1, gt=0, description="dpo, kto: of the log-ratios to the reference")

    correction: str = Field(
        "", description="what is done with old/mu, the mismatch between the two engines"
    )
    correction_level: str = Field("", description="over what old/mu is taken")
    correction_cap: float = Field(
        2.0,
        gt=0,
        description="tis, mis, reject: upper bound; minirl, decoupled_ppo: of pi/mu, prox/mu",
    )
    correction_floor: float = Field(0.0, ge=0, description="mis, reject: lower bound")
    reject_stat: Literal["ratio", "k1", "k2", "k3"] = Field(
        "ratio", description="reject: what the bounds are for"
    )

    kl: Literal["none", "k1", "k2", "k3"] = Field("none", description="to the reference policy")
    kl_coef: float = Field(0.0, ge=0, description="of the KL to the reference")
    kl_unbiased: bool = Field(
        False, description="times pi/mu: right also where an older policy sampled"
    )

    entropy_coef: float = Field(
        0.0, ge=0, description="of the entropy bonus; with a target: at the run's start"
    )
    entropy_target: float | None = Field(
        None, gt=0, description="nats a token that the coefficient adapts for; none: it stays"
    )
    entropy_rate: float = Field(
        0.1, gt=0, description="entropy_target: change of log entropy_coef a step and nat"
    )

    aggregation: str = Field("", description="what the tokens' losses are averaged over")
    constant: float = Field(1.0, gt=0, description="sum_constant: divided out, per rollout")

    value_coef: float = Field(0.5, ge=0, description="of the value loss, where there are values")
    value_clip: float | None = Field(
        0.2, gt=0, description="how far a value may move from what it was, in reward"
    )
    whiten: bool = Field(False, description="advantages of the step's tokens to mean 0, variance 1")

    overlong_budget: int | None = Field(
        None, ge=1, description="sampled tokens of a rollout from which the penalty is whole"
    )
    overlong_buffer: int = Field(1, ge=1, description="tokens before it over which it rises")
    overlong_penalty: float = Field(
        1.0, ge=0, description="what the whole penalty takes off the reward"
    )

    @property
    def needs(self) -> frozenset[Need]:
        """What has to be known of tokens besides the log-probabilities."""
        found: set[Need] = set()
        if self.kl != "none" or self.surrogate in ("dpo", "kto"):
            found.add("reference")
        if self.surrogate == "kto":
            found.add("kto_z")
        if self.advantage == "gae":
            found.add("value")
        return frozenset(found)

    @property
    def has_entropy(self) -> bool:
        """Whether the entropy is a term of the loss, and not only logged."""
        return self.entropy_coef > 0

    def next_entropy_coef(self, coef: float, entropy: float) -> float:
        """The coefficient after a step whose sampled tokens had this mean entropy.

        coef x exp(rate x (target - entropy)): gradient descent on its logarithm, as SAC adapts its
        temperature (arXiv 1812.05905). It rises below the target and falls above it. Without a
        target it stays.
        """
        if self.entropy_target is None:
            return coef
        moved = coef * math.exp(self.entropy_rate * (self.entropy_target - entropy))
        return min(max(moved, LOWEST_ENTROPY_COEF), HIGHEST_ENTROPY_COEF)

    @property
    def compares(self) -> bool:
        """Whether a rollout without others of its group, or whose rewards all are the same, has
        nothing to teach."""
        return self.advantage in GROUP_RELATIVE or (self.advantage == "ipa" and self.centre)

    @property
    def bounds_mismatch(self) -> bool:
        """Whether what an engine samples from a coarser policy than the trained one has a bounded
        weight: by a correction, or by a surrogate that has pi/mu in it. Of a surrogate of the
        user's own nothing is known, and one that samples nothing needs none."""
        return (
            self.correction != "none"
            or self.surrogate in (*USE_ROLLOUT_LOGPROBS, *SUPERVISED)
            or is_import_path(self.surrogate)
        )

    @property
    def weighs_turns(self) -> bool:
        """Whether the advantages that turns were given are read: not where there are none, or
        where they are of values."""
        own = custom_part_reads(self)
        read = own is None or "advantage" in used_settings(self.model_dump(), own)
        return read and self.advantage != "gae"

    @property
    def needs_paths(self) -> bool:
        """Whether a row must be one path of a rollout, and not its whole tree: KTO's z is of
        prompts with another row's completion."""
        return self.surrogate == "kto"

    @property
    def has_custom_parts(self) -> bool:
        """Whether a part that sees tokens is the user's own, and may read anything of them."""
        return any(is_import_path(getattr(self, part)) for part in PARTS if part != "advantage")

    @property
    def sums_rollouts(self) -> bool:
        """Whether something is summed over whole rollouts (`tokens.rollout_sum`), or may be: of a
        user's own part nothing is known."""
        return (
            self.has_custom_parts
            or self.ratio in ("sequence", "product")
            or self.correction_level in ("sequence", "sequence_product")
            or self.surrogate == "kto"
        )

    @property
    def whitens(self) -> bool:
        """Whether the trained tokens' advantages are brought to mean 0 and variance 1."""
        return self.whiten or self.advantage == "reinforce++"

    @property
    def learns_from_demonstrations(self) -> bool:
        """Whether an expert's tokens may have a loss, and so count; of a surrogate of the user's
        own they may."""
        return self.surrogate in LEARN_FROM_DEMONSTRATIONS or is_import_path(self.surrogate)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("preset", "grpo")
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
        return PRESETS[name] | data

    @field_validator(*PARTS)
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        assert info.field_name is not None
        check_part(info.field_name, value)
        return value

    @field_validator("judge")
    @classmethod
    def _loads(cls, value: str | None) -> str | None:
        if value is not None:
            load_judge(value)
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> ObjectiveSettings:
        check_compatible(self)
        return self


def preset(name: str, **changes: Any) -> ObjectiveSettings:
    """A preset, parts of it overridden: `preset("grpo", advantage="dr_grpo")`."""
    return ObjectiveSettings.model_validate({"preset": name, **changes})


# Names that were recorded before 0.1.
_EARLIER_NAMES = {
    "over_length_budget": "overlong_budget",
    "over_length_part": "overlong_buffer",
    "over_length_penalty": "overlong_penalty",
}


def drop_unused(given: dict[str, Any]) -> dict[str, Any]:
    """Stored settings under today's names, less what nothing in the objective reads: before that
    was an error, it was recorded. All of them where a part or preset is none of ours."""
    given = {_EARLIER_NAMES.get(name, name): value for name, value in given.items()}
    known = PRESETS.get(given.get("preset", "grpo"), {}) | given
    if any(known.get(kind) not in PARTS[kind] for kind in PARTS):
        return given
    defaults = {name: field.default for name, field in ObjectiveSettings.model_fields.items()}
    read = used_settings(defaults | known, {})
    return {name: value for name, value in given.items() if name in read}
