"""Why a turn is not trained. The first reason that holds is the answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from tracegrad.events import GREEDY_BELOW, Turn
from tracegrad.import_path import import_part
from tracegrad.turn_scopes import TurnScope
from tracegrad.turn_tree import TokenDigests, TurnTree
from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.turn_access import (
    RolloutLike,
    as_int_array,
    is_cut_short,
    is_demonstration,
    length_of,
    temperature_of,
)
from tracegrad_trainer.batches.turn_selector import TURN_NOT_SELECTED, is_selected
from tracegrad_trainer.batches.version_scale import VersionScale
from tracegrad_trainer.losses.advantages import RolloutRewards

EQUAL_REWARD = "equal_reward"
# `Turn.untrainable` for the sake of how it was sampled: a demonstration was not sampled.
SAMPLING_REASONS = frozenset(
    {
        *("greedy", "sampling_truncated", "sampling_penalised", "sampling_replaced"),
        *("constrained", "no_logprobs", "version_unknown"),
    }
)


def turn_reason(
    turn: Turn,
    settings: BatchSettings,
    versions: VersionScale,
    failed_versions: Collection[int] = (),
    vocabulary: int | None = None,
) -> str | None:
    """Why this turn must not be trained, or None, by what the turn itself is.

    `vocabulary`: how many tokens the model knows; None: whatever is there. A demonstration may
    have any log-probabilities, versions and sampling settings: nothing reads them.
    """
    demonstrated = is_demonstration(turn)
    if turn.untrainable is not None and not (demonstrated and turn.untrainable in SAMPLING_REASONS):
        return turn.untrainable
    if not turn.completion_token_ids:
        return "no_tokens"
    if not turn.prompt_token_ids:
        return "no_prompt"
    if vocabulary is not None and _foreign(turn, vocabulary):
        return "foreign_token"
    if not demonstrated:
        if temperature_of(turn) < GREEDY_BELOW:
            return "greedy"
        if not np.isfinite(np.frombuffer(turn.completion_logprobs, np.float32)).all():
            return "non_finite"
        if any(version in failed_versions for version, _ in turn.policy_versions):
            return "failed_push"
        if versions.is_rolled_back(turn):
            return "rolled_back"
        if settings.max_staleness is not None and versions.lag(turn) > settings.max_staleness:
            return "stale"
    if settings.drop_truncated and is_cut_short(turn):
        return "truncated"
    if length_of(turn) > settings.row_limit:
        return "over_long"
    return None


def reasons_of(
    rollout: RolloutLike,
    tree: TurnTree[Turn],
    settings: BatchSettings,
    *,
    equal_reward: bool,
    versions: VersionScale,
    too_long: str | None = None,
    imitated: Collection[str] = (),
    failed_versions: Collection[int] = (),
    vocabulary: int | None = None,
    scopes: Mapping[str, TurnScope] = {},
) -> dict[str, str]:
    """The rollout's turns (by id) that are not trained, with their reasons; `tree` is theirs.

    `equal_reward`: the rewards of its group do not differ. `too_long`: why none of its sampled
    turns is trained. `imitated`: demonstrated turns, which teach all the same. `scopes`: by turn id
    what turns are selected by.

    Raises:
        ValueError: the user's predicate failed.
    """
    lost = _lost_paths(tree, settings) if settings.over_long == "drop" else frozenset()
    whole = outcome_reason(rollout, settings, equal_reward)
    reasons: dict[str, str] = {}
    digests = tree.digests if settings.drop_repeated else None
    seen: set[TokenDigests] = set()
    for i, turn in enumerate(tree.turns):
        reason = None if is_selected(turn, settings, scopes) else TURN_NOT_SELECTED
        reason = reason or turn_reason(turn, settings, versions, failed_versions, vocabulary)
        if reason is None and not (whole == EQUAL_REWARD and turn.turn_id in imitated):
            reason = whole
        if reason is None and too_long is not None and not is_demonstration(turn):
            reason = too_long
        if reason is None and turn.turn_id in lost:
            reason = "over_long"
        if reason is None and settings.predicate is not None:
            reason = apply_predicate(settings.predicate, turn, rollout)
        if reason is None and digests is not None:
            # Of equal turns the first stays that nothing else speaks against.
            if digests[i] in seen:
                reason = "repeated_turn"
            seen.add(digests[i])
        if reason is not None:
            reasons[turn.turn_id] = reason
    return reasons


def apply_predicate(path: str, turn: Turn, rollout: RolloutLike) -> str | None:
    """The user's own filter, a function by its import path. None: the turn may be trained; else
    why not.

    Raises:
        ValueError: the function failed, or returned neither a bool nor a reason.
    """
    where = f"predicate {path!r} on turn {turn.turn_id} of rollout {rollout.rollout_id}"
    try:
        answer = import_part("predicate", path)(turn, rollout)
    except Exception as error:
        raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
    if isinstance(answer, bool | np.bool_):
        reason = None if answer else "predicate"
    elif isinstance(answer, str) and answer:
        reason = answer
    else:
        raise ValueError(f"{where} returned {answer!r}: return True, False or a reason")
    return reason


def outcome_reason(rollout: RolloutLike, settings: BatchSettings, equal_reward: bool) -> str | None:
    """Why no turn of the rollout is trained."""
    outcome = getattr(rollout, "outcome", None)
    if outcome is not None and str(outcome) not in settings.outcomes:
        return str(outcome)
    return EQUAL_REWARD if equal_reward and settings.drop_equal_reward else None


def length_reason(
    rollout: RolloutRewards, settings: BatchSettings, advantage: NDArray[np.float64]
) -> str | None:
    """Why no sampled turn of the rollout is trained: it failed, and at great length.

    It failed if its advantages, f64[K], one a turn, come to 0 or less over the sampled tokens.
    Few such rollouts outweigh the others of a step, and what they have in common is their length.
    """
    turns = len(rollout.tokens) - len(rollout.demonstrations)
    most_tokens, most_turns = settings.negative_max_tokens, settings.negative_max_turns
    is_long = (most_tokens is not None and rollout.tokens.sum() > most_tokens) or (
        most_turns is not None and turns > most_turns
    )
    if is_long and float((advantage * rollout.tokens).sum()) <= 0:
        return "long_negative"
    return None


def staleness_weights(
    rollout: RolloutLike, settings: BatchSettings, versions: VersionScale
) -> NDArray[np.float64]:
    """What each turn's advantage is multiplied by. A turn that weights changed under is as old
    as its oldest token, so that its tokens keep one advantage."""
    lags = [
        0 if is_demonstration(turn) or not turn.policy_versions else versions.lag(turn)
        for turn in rollout.turns
    ]
    return np.asarray(settings.stale_decay ** np.maximum(lags, 0).astype(np.float64))


def _foreign(turn: Turn, vocabulary: int) -> bool:
    for tokens in (as_int_array(turn.prompt_token_ids), as_int_array(turn.completion_token_ids)):
        if tokens.max() >= vocabulary or tokens.min() < 0:
            return True
    return False


def _lost_paths(tree: TurnTree[Turn], settings: BatchSettings) -> frozenset[str]:
    """Turns all of whose paths are longer than a row."""
    fitting = {
        turn.turn_id
        for path in tree.paths()
        if max(map(length_of, path)) <= settings.row_limit
        for turn in path
    }
    return frozenset(tree.places) - fitting
