"""Turn trees -> training rows -> packed micro-batches. NumPy only."""

from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.expert_routing import Layout, Routes
from tracegrad_trainer.batches.filters import turn_reason
from tracegrad_trainer.batches.micro_batch import MicroBatch, micro_batch
from tracegrad_trainer.batches.mini_batches import mini_batches
from tracegrad_trainer.batches.packing import pack, packing_stats, plan
from tracegrad_trainer.batches.preferences import Pairing, labels_of, mismatched, ones, pairs_of
from tracegrad_trainer.batches.rows import Row, rows_of
from tracegrad_trainer.batches.select import GroupLike, Selection, scored, select
from tracegrad_trainer.batches.turn_access import RolloutLike

__all__ = [
    "BatchSettings",
    "GroupLike",
    "Layout",
    "MicroBatch",
    "Pairing",
    "RolloutLike",
    "Routes",
    "Row",
    "Selection",
    "labels_of",
    "micro_batch",
    "mini_batches",
    "mismatched",
    "ones",
    "pack",
    "packing_stats",
    "pairs_of",
    "plan",
    "rows_of",
    "scored",
    "select",
    "turn_reason",
]
