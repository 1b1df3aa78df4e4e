"""What is learnt together, what is only measured, and in which order: decided by the seed."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad_trainer.batches import (
    Row,
    TrainingSelection,
    labelled_rows,
    preference_pairs,
    select,
    unit_advantages,
)
from tracegrad_trainer.batches.turn_selector import UnmatchedPattern, unmatched_patterns
from tracegrad_trainer.sft.config import SftSettings
from tracegrad_trainer.sft.dataset import ChosenExamples


@dataclass(frozen=True, slots=True, eq=False)
class TrainingUnit:
    """Rows that go through one optimizer step together: a rollout's, or a pair's."""

    group_id: str
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def targets(self) -> int:
        return sum(int(row.keep.sum()) for row in self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class SftData:
    """`reasons` count what is neither learnt nor measured: "turns: over_long". `unmatched`: what
    selects turns, and fits none of those that were chosen."""

    train: list[TrainingUnit]
    held_out: list[TrainingUnit]
    found: int  # rollouts that match the filter
    rollouts: int  # that have a row
    turns: int  # that are learnt or measured
    pairs: int
    reasons: Counter[str]
    unmatched: list[UnmatchedPattern]


def build_data(
    chosen: ChosenExamples, settings: SftSettings, *, vocabulary: int | None = None
) -> SftData:
    """Rows of the chosen rollouts.

    Raises:
        ValueError: there is nothing to learn from; the line says why.
    """
    selection = _selected(chosen, settings, vocabulary)
    reasons = chosen.reasons + Counter(f"turns: {why}" for why in selection.skipped.values())
    units = _units(selection.rows, settings)
    unmatched = _unmatched(chosen, settings)
    if not units:
        said = [_nothing(chosen, settings, reasons), *map(str, unmatched)]
        raise ValueError("; ".join(said))
    learnt, held_out = split_held_out(units, settings.held_out, settings.trainer.seed)
    return SftData(
        train=learnt,
        held_out=held_out,
        found=chosen.found,
        rollouts=len({row.rollout_id for row in selection.rows}),
        turns=len(selection.trained),
        pairs=len({row.pair for row in selection.rows} - {-1}),
        reasons=reasons,
        unmatched=unmatched,
    )


def _unmatched(chosen: ChosenExamples, settings: SftSettings) -> list[UnmatchedPattern]:
    turns = [turn for task in chosen.groups for one in task.rollouts for turn in one.turns]
    return unmatched_patterns(turns, settings.trainer.batches, chosen.scopes)


def _selected(
    chosen: ChosenExamples, settings: SftSettings, vocabulary: int | None
) -> TrainingSelection:
    batches = settings.trainer.batches.model_copy(update={"drop_equal_reward": False})
    # Every turn is a demonstration by now: versions mean nothing.
    if settings.preset == "sft":
        return select(
            chosen.groups,
            batches,
            advantages=unit_advantages,
            current_version=0,
            vocabulary=vocabulary,
            scopes=chosen.scopes,
        )
    if settings.preset == "kto":
        return labelled_rows(
            chosen.groups,
            batches,
            current_version=0,
            vocabulary=vocabulary,
            scopes=chosen.scopes,
        )
    return preference_pairs(
        chosen.groups,
        batches,
        current_version=0,
        choose=settings.pairs,
        most=settings.pairs_per_task,
        vocabulary=vocabulary,
        scopes=chosen.scopes,
    )


def _units(rows: Sequence[Row], settings: SftSettings) -> list[TrainingUnit]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = row.pair if settings.preset == "dpo" else row.rollout_id
        found.setdefault(key, []).append(row)
    return [TrainingUnit(some[0].group_id, tuple(some)) for some in found.values()]


def _nothing(chosen: ChosenExamples, settings: SftSettings, reasons: Counter[str]) -> str:
    why = ", ".join(f"{what} {count}" for what, count in reasons.most_common(5))
    why = f" ({why})" if why else ""
    if not chosen.found:
        return "no rollouts match; `tracegrad rollouts ls` takes the same filters"
    if settings.preset == "sft" or not chosen.groups:
        return f"{chosen.found} rollouts match, and none has a turn to learn from{why}"
    if reasons.get("turns: equal_reward") or all(len(t.rollouts) < 2 for t in chosen.groups):
        return (
            f"no {'pairs' if settings.preset == 'dpo' else 'better and worse rollouts'}: rewards"
            f" are equal within every task, or it has one rollout{why};"
            " choose tasks whose rollouts differ in reward"
        )
    return f"{chosen.found} rollouts match, and none can be compared with another{why}"


def split_held_out(
    units: Sequence[TrainingUnit], share: float, seed: int
) -> tuple[list[TrainingUnit], list[TrainingUnit]]:
    """To learn from, and to measure: whole tasks, so that nothing measured was learnt.

    Of the tasks that share is held out, rounded down; the same ones whatever else is chosen, as
    far as the share allows.
    """
    tasks = sorted({unit.group_id for unit in units}, key=lambda task: _digest([seed, task]))
    out = set(tasks[: int(len(tasks) * share)])
    return (
        [unit for unit in units if unit.group_id not in out],
        [unit for unit in units if unit.group_id in out],
    )


def plan_epoch(sizes: Sequence[int], budget: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Numbers of the units of each optimizer step of an epoch: each unit once, shuffled.

    A step is full when the next unit would exceed `budget` tokens; it has one unit at least.
    """
    order = list(range(len(sizes)))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    steps: list[list[int]] = []
    room = 0
    for unit in order:
        if not steps or sizes[unit] > room:
            steps.append([])
            room = budget
        steps[-1].append(unit)
        room -= sizes[unit]
    return steps


def data_digest(data: SftData, settings: SftSettings) -> str:
    """What decides the weights, in 12 characters: rows and settings."""
    found = hashlib.blake2b(json.dumps(settings.fingerprint(), sort_keys=True).encode())
    for units in (data.train, data.held_out):
        for unit in units:
            for row in unit.rows:
                for values in (row.input_ids, row.keep, row.positions, row.predecessors):
                    found.update(values.tobytes())
                found.update(f"{row.pair} {row.label};".encode())
        found.update(b"|")
    return found.hexdigest()[:12]


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()
