"""Ways in and out of a store: whole copies, rows for scripts, layouts that other trainers read."""

from tracegrad.atomic_file import OutputFailed
from tracegrad.transfer.field_reader import BadObject
from tracegrad.transfer.layouts import Layout, LayoutUnknown, layout_named, layout_names

__all__ = [
    "BadObject",
    "Layout",
    "LayoutUnknown",
    "OutputFailed",
    "layout_named",
    "layout_names",
]
