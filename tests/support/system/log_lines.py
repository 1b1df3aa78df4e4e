"""What a test has this project's loggers say."""

from __future__ import annotations

import logging

import pytest


def our_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of the loggers of this project: asyncio's and libraries' may be of what an earlier test left
    to the garbage collector."""
    return [each for each in caplog.records if each.name.startswith("tracegrad")]


def our_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in our_records(caplog)]
