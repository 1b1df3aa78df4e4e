"""Care of a store: what may go, what must not be readable any more, whether all is well."""

from tracegrad.store.maintenance.doctor import Report, examine
from tracegrad.store.maintenance.drop_text import TextRule, drop_text, preview_text, without_text
from tracegrad.store.maintenance.findings import Finding
from tracegrad.store.maintenance.redaction import FIELDS, Redacted, Redaction, redact
from tracegrad.store.maintenance.removal_log import removed_in_all
from tracegrad.store.maintenance.retention import Preview, Retention, preview, prune
from tracegrad.store.maintenance.selection import Selection

__all__ = [
    "FIELDS",
    "Finding",
    "Preview",
    "Redacted",
    "Redaction",
    "Report",
    "Retention",
    "Selection",
    "TextRule",
    "drop_text",
    "examine",
    "preview",
    "preview_text",
    "prune",
    "redact",
    "removed_in_all",
    "without_text",
]
