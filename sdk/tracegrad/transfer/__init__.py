"""Ways in and out of a store: whole copies, rows for scripts, layouts that other trainers read."""

from tracegrad.atomic_file import WriteFailed
from tracegrad.transfer.layouts import ExportLayout, LayoutUnknown, find_layout, layout_names
from tracegrad.transfer.validation import InvalidObject

__all__ = [
    "ExportLayout",
    "InvalidObject",
    "LayoutUnknown",
    "WriteFailed",
    "find_layout",
    "layout_names",
]
