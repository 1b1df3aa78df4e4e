"""Made-up rollouts and groups with everything that a batch may look at, and random trees."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from support.trainer.row_samples import turn
from tracegrad.events import Outcome, Turn
from tracegrad.turn_scopes import TurnScope
from tracegrad.turn_tree import TurnTree
from tracegrad_trainer.batches import (
    BatchSettings,
    RoutingLayout,
    TrainingSelection,
    select,
    unit_advantages,
)
from tracegrad_trainer.batches.rows import RowSource
from tracegrad_trainer.batches.select import AdvantageFunction
from tracegrad_trainer.batches.version_scale import RolledBackVersions, SkippedVersions


@dataclass
class Rollout:
    rollout_id: str
    reward: float
    turns: list[Turn] = field(default_factory=list)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    agent: str | None = None
    outcome: Outcome = Outcome.COMPLETED


@dataclass
class Task:
    group_id: str
    rollouts: list[Rollout]


def source_of(
    rollout: Rollout,
    group_id: str = "g",
    advantages: Sequence[float] | None = None,
    skipped: Collection[str] = (),
    layout: RoutingLayout | None = None,
) -> RowSource:
    """What rows of the rollout are made of; every advantage is 1 if none are given."""
    values = [1.0] * len(rollout.turns) if advantages is None else advantages
    return RowSource(rollout, TurnTree.of(rollout.turns), group_id, values, skipped, layout)


def selected(
    groups: Sequence[Task],
    *,
    advantages: AdvantageFunction = unit_advantages,
    version: int = 1,
    skipped_versions: SkippedVersions = (),
    rolled_back_versions: RolledBackVersions = (),
    vocabulary: int | None = None,
    scopes: Mapping[str, TurnScope] = {},
    **settings: object,
) -> TrainingSelection:
    """What is selected with these batch settings; groups of equal reward are trained too."""
    values: dict[str, object] = {"drop_equal_reward": False, "max_staleness": None} | settings
    return select(
        groups,
        BatchSettings.model_validate(values),
        advantages=advantages,
        current_version=version,
        skipped_versions=skipped_versions,
        rolled_back_versions=rolled_back_versions,
        vocabulary=vocabulary,
        scopes=scopes,
    )


@st.composite
def trees(draw: st.DrawFn, *, vocabulary: int = 2, most: int = 10) -> list[Turn]:
    """Turns in any order of capture, from few tokens, so that siblings begin alike. Of some
    turns the parent is not known although their prompt continues it."""
    made: list[Turn] = []
    tokens = st.integers(0, vocabulary - 1)
    for i in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from([None, *made]))
        prompt = draw(st.lists(tokens, min_size=1, max_size=4))
        completion = draw(st.lists(tokens, min_size=1, max_size=4))
        new = turn(f"t{i}", prompt, completion, parent=parent)
        made.append(replace(new, parent_id=None) if draw(st.integers(0, 5)) == 0 else new)
    return draw(st.permutations(made))
