"""The SQL store: facts, the turn tree, the ledger of what was trained."""

from tracegrad.store.errors import (
    AlreadyTrained,
    AmbiguousRollout,
    FactRefused,
    LedgerError,
    ParentMissing,
    StoreCorrupt,
    StoreError,
    StoreForeign,
    StoreMissing,
    StoreTooNew,
    StoreUnavailable,
    UnknownRollout,
)
from tracegrad.store.filters import ALL, OPEN, RolloutFilter
from tracegrad.store.history import History
from tracegrad.store.ledger import Ledger
from tracegrad.store.store import DEFAULT_URL, Store
from tracegrad.store.views import (
    Group,
    LeaseRecord,
    Peek,
    PolicyVersion,
    RewardPoint,
    RolloutDetail,
    RolloutRow,
    RolloutSample,
    StepRecord,
    TurnCounts,
    TurnFate,
    WaitingTask,
)
from tracegrad.store.writer import Writer

__all__ = [
    "ALL",
    "DEFAULT_URL",
    "OPEN",
    "AlreadyTrained",
    "AmbiguousRollout",
    "FactRefused",
    "Group",
    "History",
    "LeaseRecord",
    "Ledger",
    "LedgerError",
    "ParentMissing",
    "Peek",
    "PolicyVersion",
    "RewardPoint",
    "RolloutDetail",
    "RolloutFilter",
    "RolloutRow",
    "RolloutSample",
    "StepRecord",
    "Store",
    "StoreCorrupt",
    "StoreError",
    "StoreForeign",
    "StoreMissing",
    "StoreTooNew",
    "StoreUnavailable",
    "TurnCounts",
    "TurnFate",
    "UnknownRollout",
    "WaitingTask",
    "Writer",
]
