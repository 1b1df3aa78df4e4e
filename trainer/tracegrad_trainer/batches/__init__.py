"""Turn trees -> training rows -> packed micro-batches. NumPy only."""

from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.expert_routing import ExpertRouting, RoutingLayout
from tracegrad_trainer.batches.filters import turn_reason
from tracegrad_trainer.batches.micro_batch import MicroBatch, micro_batch
from tracegrad_trainer.batches.packing import (
    PackingRule,
    mini_batches,
    pack,
    packing_stats,
    plan_packing,
    shares_rows,
)
from tracegrad_trainer.batches.preferences import (
    Pairing,
    labelled_rows,
    mismatched_rows,
    preference_pairs,
    unit_advantages,
)
from tracegrad_trainer.batches.rows import Row, rows_of
from tracegrad_trainer.batches.select import (
    TrainingSelection,
    rollout_rewards_of,
    select,
)

__all__ = [
    "BatchSettings",
    "ExpertRouting",
    "MicroBatch",
    "PackingRule",
    "Pairing",
    "RoutingLayout",
    "Row",
    "TrainingSelection",
    "labelled_rows",
    "micro_batch",
    "mini_batches",
    "mismatched_rows",
    "pack",
    "packing_stats",
    "plan_packing",
    "preference_pairs",
    "rollout_rewards_of",
    "rows_of",
    "select",
    "shares_rows",
    "turn_reason",
    "unit_advantages",
]
