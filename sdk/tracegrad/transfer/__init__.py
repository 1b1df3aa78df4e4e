"""Ways in and out of a store: whole copies, rows for scripts, layouts that other trainers read."""

from tracegrad.transfer.fields import BadObject
from tracegrad.transfer.layouts import Layout, LayoutUnknown, layout_named, layout_names
from tracegrad.transfer.output import OutputFailed

__all__ = [
    "BadObject",
    "Layout",
    "LayoutUnknown",
    "OutputFailed",
    "layout_named",
    "layout_names",
]
