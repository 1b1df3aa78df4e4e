"""`trainer score`: rollouts are scored now, by the scorers of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from tracegrad.store import Store, StoreError
from tracegrad.store.read.rollouts import resolve_rollout
from tracegrad.text_format import format_count
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.session import (
    StartError,
    StopRequested,
    open_store,
    raising_on_stop_signals,
)
from tracegrad_trainer.rewards.scoring import ScoringScope, ScoringTotals, score_now
from tracegrad_trainer.utils.console import print_error, print_json

FAILED, BAD_USAGE, NOTHING = 1, 2, 3


def score(
    settings: TrainerSettings,
    ids: Sequence[str],
    console: Console,
    *,
    again: bool = False,
    as_json: bool = False,
) -> int:
    """0: something was scored, or a sum was made; 3: there was nothing to do; 1: some failed; 2: a
    wrong setting or id."""
    if not settings.rewards.composes:
        print_error(
            "trainer score: [rewards] names nobody who scores: set rewards.functions,"
            " rewards.commands or rewards.judge",
            console,
        )
        return BAD_USAGE
    try:
        with raising_on_stop_signals(), open_store(settings.proxy.store) as store:
            wanted = _resolved(store, ids)
            totals = score_now(
                store,
                settings.rewards,
                scoring_scope(settings),
                rollout_ids=wanted or None,
                again="all" if again else "failed",
            )
    except StopRequested as stop:
        print_error(f"trainer score: stopped by {stop}; what was scored is in the store", console)
        return FAILED
    except (StartError, StoreError, ValueError, OSError) as error:
        print_error(f"trainer score: {error}", console)
        return BAD_USAGE
    if as_json:
        print_json(asdict(totals))
    else:
        console.print(describe_totals(totals), highlight=False, soft_wrap=True)
    if totals.failed:
        return FAILED
    return 0 if totals.scored or totals.unknown or totals.composed else NOTHING


def scoring_scope(settings: TrainerSettings) -> ScoringScope:
    return ScoringScope(
        tags=settings.data.tags,
        group_size=settings.batches.group_size,
        incomplete_after_s=settings.data.incomplete_after_s,
        seed=settings.seed,
        held_out=settings.promotion.held_out,
    )


def describe_totals(totals: ScoringTotals) -> str:
    """`12 scorings, 1 of them unknown, 2 failed; 9 rewards composed`"""
    scorings = totals.scored + totals.unknown + totals.failed
    parts = [format_count(scorings, "scoring")]
    parts += [f"{totals.unknown} unknown"] if totals.unknown else []
    parts += [f"{totals.failed} failed"] if totals.failed else []
    line = f"{', '.join(parts)}; {format_count(totals.composed, 'reward')} composed"
    if totals.failed:
        line += "\n`tracegrad rollouts explain ID` has the errors; `trainer score` tries again"
    return line


def _resolved(store: Store, ids: Sequence[str]) -> list[str]:
    """Raises StoreError: there is no such rollout."""
    with store.reading() as connection:
        return [resolve_rollout(connection, each) for each in ids]
