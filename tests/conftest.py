"""For every test."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile

import pytest
from hypothesis import settings

_journals = tempfile.mkdtemp(prefix="tracegrad-journals-")
_numbers = itertools.count()


def pytest_configure() -> None:
    # A shell that runs the tests in its background has them ignore SIGINT; the programs that they
    # start, and then interrupt, would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    # An example that takes long says something of the machine's load; CI's profile has none either.
    settings.register_profile("unhurried", settings.default, deadline=None)
    settings.load_profile("unhurried")
    os.environ["TRACEGRAD_JOURNAL"] = _journals


def pytest_unconfigure() -> None:
    shutil.rmtree(_journals, ignore_errors=True)


@pytest.fixture(autouse=True)
def _a_journal_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test leaves undelivered is not sent to a later one's proxy on the same port."""
    monkeypatch.setenv("TRACEGRAD_JOURNAL", f"{_journals}/{next(_numbers)}")
