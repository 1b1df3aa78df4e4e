"""The trainer: batches of the turns that tracegrad captured, optimizer steps, weight pushes."""

from tracegrad.version import VERSION

__version__ = VERSION
