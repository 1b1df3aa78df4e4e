"""Care of a store: what may go, what must not be readable any more, whether all is well."""

from tracegrad.store.care.doctor import Report, examine
from tracegrad.store.care.findings import Finding
from tracegrad.store.care.redaction import FIELDS, Redacted, Redaction, redact
from tracegrad.store.care.removals import removed_in_all
from tracegrad.store.care.retention import Preview, Retention, preview, prune
from tracegrad.store.care.selection import Selection
from tracegrad.store.care.text import TextRule, drop_text, preview_text, without_text

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
