"""Turn trees -> training rows -> packed micro-batches. NumPy only."""

from .micro_batch import MicroBatch, micro_batch
from .packing import pack, plan
from .rows import RolloutLike, Row, rows_of
from .select import GroupLike, Selection, select, turn_reason
from .settings import BatchSettings

__all__ = [
    "BatchSettings",
    "GroupLike",
    "MicroBatch",
    "RolloutLike",
    "Row",
    "Selection",
    "micro_batch",
    "pack",
    "plan",
    "rows_of",
    "select",
    "turn_reason",
]
