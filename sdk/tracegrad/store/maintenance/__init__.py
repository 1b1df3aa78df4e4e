"""Care of a store: what may go, what must not be readable any more, whether all is well."""

from tracegrad.store.maintenance.doctor import DoctorReport, examine
from tracegrad.store.maintenance.drop_text import (
    TextRemovalRule,
    drop_text,
    preview_drop_text,
    without_texts_of_event,
)
from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.maintenance.redaction import (
    REDACTABLE_FIELDS,
    RedactionResult,
    RedactionRule,
    redact,
)
from tracegrad.store.maintenance.removal_log import total_removed
from tracegrad.store.maintenance.retention import PrunePreview, RetentionRule, preview_prune, prune
from tracegrad.store.maintenance.selection import RolloutSelection

__all__ = [
    "REDACTABLE_FIELDS",
    "DoctorReport",
    "Finding",
    "PrunePreview",
    "RedactionResult",
    "RedactionRule",
    "RetentionRule",
    "RolloutSelection",
    "TextRemovalRule",
    "drop_text",
    "examine",
    "preview_drop_text",
    "preview_prune",
    "prune",
    "redact",
    "total_removed",
    "without_texts_of_event",
]
