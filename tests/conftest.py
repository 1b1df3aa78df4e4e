"""For every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that runs the tests in its background has them ignore SIGINT; the programs that they
    start, and then interrupt, would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
