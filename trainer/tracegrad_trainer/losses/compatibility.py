"""Which parts and numbers of an objective do not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tracegrad.import_path import import_part, is_import_path
from tracegrad_trainer.losses.part_names import (
    OF_ANY_SURROGATE,
    PARTS,
    PREFERENCES,
    SUPERVISED,
    USE_ROLLOUT_LOGPROBS,
    WEIGHTS,
    Reads,
    readers_of,
    used_settings,
)
from tracegrad_trainer.losses.presets import PRESETS

if TYPE_CHECKING:
    from tracegrad_trainer.losses.config import ObjectiveSettings

# Where the entropy's coefficient stays if it has a target: it comes back from the first in some
# steps, and beyond the second the policy would learn little else.
LOWEST_ENTROPY_COEF, HIGHEST_ENTROPY_COEF = 1e-6, 1.0


def check_compatible(settings: ObjectiveSettings) -> None:
    """Raises ValueError: the first thing that does not fit, and what to do about it.

    Of a user's own parts nothing is known, so nothing is held against them.
    """
    for wrong in _CHECKS:
        message = wrong(settings)
        if message is not None:
            raise ValueError(message)


def _aggregation(settings: ObjectiveSettings) -> str | None:
    of = {"dpo": "pair_mean", "kto": "label_mean"}
    surrogate, aggregation = settings.surrogate, settings.aggregation
    wanted = of.get(surrogate)
    if wanted is not None and aggregation != wanted and not is_import_path(aggregation):
        return f"aggregation {aggregation!r}: surrogate {surrogate!r} needs {wanted!r}"
    if wanted is None and aggregation in of.values() and not is_import_path(surrogate):
        return (
            f"aggregation {aggregation!r} is for preferences: use 'token_mean' with {surrogate!r}"
        )
    return None


def _ratio(settings: ObjectiveSettings) -> str | None:
    ratio = settings.ratio
    if is_import_path(ratio):
        return None
    if settings.surrogate == "ipa" and ratio != "turn":
        return f"ratio {ratio!r}: surrogate 'ipa' needs 'turn'"
    if settings.preset == "gspo" and ratio not in ("sequence", "turn"):
        return f"ratio {ratio!r}: the bounds of preset 'gspo' are for 'sequence' or 'turn'"
    if settings.advantage == "gae" and settings.gae_level == "token" and ratio != "token":
        return (
            f"ratio {ratio!r}: advantage 'gae' is one a token and needs 'token',"
            " or gae_level = 'turn'"
        )
    return None


def _correction(settings: ObjectiveSettings) -> str | None:
    surrogate, correction = settings.surrogate, settings.correction
    if surrogate in SUPERVISED and correction != "none":
        return f"correction {correction!r}: use 'none', surrogate {surrogate!r} samples nothing"
    if surrogate in USE_ROLLOUT_LOGPROBS and correction in WEIGHTS:
        return (
            f"correction {correction!r}: surrogate {surrogate!r} has pi/mu in it and would be"
            " corrected twice, use 'none' or 'reject'"
        )
    return None


def _bounds(settings: ObjectiveSettings) -> str | None:
    floor, cap = settings.correction_floor, settings.correction_cap
    if settings.correction in ("mis", "reject") and floor >= cap:
        return f"correction_floor {floor:g}: must be below correction_cap ({cap:g})"
    budget, buffer = settings.overlong_budget, settings.overlong_buffer
    if budget is not None and buffer > budget:
        return f"overlong_buffer {buffer}: must not exceed overlong_budget ({budget})"
    return None


def _kl(settings: ObjectiveSettings) -> str | None:
    if settings.kl == "none":
        if settings.kl_coef:
            return f"kl_coef {settings.kl_coef:g}: choose an estimator, kl = 'k1', 'k2' or 'k3'"
        if settings.kl_unbiased:
            return "kl_unbiased: choose an estimator, kl = 'k1', 'k2' or 'k3'"
    elif settings.surrogate in PREFERENCES:
        return f"kl {settings.kl!r}: use 'none', {settings.surrogate!r} has the reference in it"
    return None


def _entropy(settings: ObjectiveSettings) -> str | None:
    coef, target, surrogate = settings.entropy_coef, settings.entropy_target, settings.surrogate
    if target is not None and not coef:
        return (
            f"entropy_target {target:g}: set entropy_coef, the coefficient to begin with, above 0"
        )
    lowest, highest = LOWEST_ENTROPY_COEF, HIGHEST_ENTROPY_COEF
    if target is not None and not lowest <= coef <= highest:
        return f"entropy_coef {coef:g}: with entropy_target from {lowest:g} to {highest:g}"
    if coef and surrogate in SUPERVISED:
        return f"entropy_coef {coef:g}: surrogate {surrogate!r} samples nothing, use 0"
    return None


def _advantage(settings: ObjectiveSettings) -> str | None:
    if settings.whiten and settings.surrogate in SUPERVISED:
        return f"whiten: surrogate {settings.surrogate!r} has no advantages, leave it off"
    if settings.advantage == "gae" and settings.surrogate in SUPERVISED:
        return f"advantage 'gae': surrogate {settings.surrogate!r} has none, use 'dr_grpo'"
    return None


def _unused(settings: ObjectiveSettings) -> str | None:
    """A value that is neither the preset's nor the default is the user's: to do nothing with it
    would be to ignore what was asked for."""
    own = custom_part_reads(settings)
    if own is None:
        return None
    read = used_settings(settings.model_dump(), own)
    if settings.options and not own:
        return "options: they are for parts of your own, and all of these are ours: leave them out"
    usual = PRESETS[settings.preset]
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name not in read and value != usual.get(name, field.default) and name != "options":
            of = ", ".join(readers_of(name))
            return f"{name} = {value!r}: nothing in this objective uses it (it is of {of})"
    return None


def custom_part_reads(settings: ObjectiveSettings) -> dict[str, Reads] | None:
    """What the user's own parts read (`part.reads`), by their paths; None: one has no such
    attribute, and may read anything."""
    found: dict[str, Reads] = {}
    for kind in PARTS:
        path = getattr(settings, kind)
        if is_import_path(path):
            read: Reads | None = getattr(import_part(kind, path), "reads", None)
            if read is None:
                return None
            found[path] = (*read, *OF_ANY_SURROGATE) if kind == "surrogate" else read
    return found


_CHECKS: tuple[Callable[[ObjectiveSettings], str | None], ...] = (
    _aggregation,
    _ratio,
    _correction,
    _bounds,
    _kl,
    _entropy,
    _advantage,
    _unused,
)
