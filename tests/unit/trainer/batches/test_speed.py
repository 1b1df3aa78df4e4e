from __future__ import annotations

from support.trainer.batch_building import append_only, build
from tracegrad_trainer.batches import BatchSettings

GOAL = 500_000  # tokens per second, on one core


def test_batches_are_built_faster_than_the_goal() -> None:
    groups = append_only(groups=2, group_size=8, turns=20, tokens=8000, sampled=100)
    settings = BatchSettings(tokens_per_micro_batch=16384)
    built = [build(groups, settings) for _ in range(3)]
    # Sixteen rollouts, a quarter of whose tokens were sampled; each token once.
    assert {(each.tokens, each.targets) for each in built} == {(16 * 8000, 16 * 2000)}
    assert max(each.tokens_per_second for each in built) > GOAL
