"""Turn trees -> training rows -> packed micro-batches. NumPy only."""

from .filters import turn_reason
from .micro_batch import MicroBatch, micro_batch
from .mini_batches import mini_batches
from .packing import pack, packing_stats, plan
from .preferences import Pairing, labels_of, mismatched, ones, pairs_of
from .rollouts import RolloutLike
from .routes import Layout, Routes
from .rows import Row, rows_of
from .select import GroupLike, Selection, scored, select
from .settings import BatchSettings

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
