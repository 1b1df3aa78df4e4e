"""Ids that nobody else makes, in the order of their making."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

from tracegrad import events
from tracegrad.events import new_id

_FORK = """
import os
from tracegrad.events import new_id
new_id()
read, write = os.pipe()
pid = os.fork()
ids = [new_id() for _ in range(3)]
if pid == 0:
    os.write(write, " ".join(ids).encode())
    os._exit(0)
os.waitpid(pid, 0)
print(*ids, os.read(read, 1000).decode())
"""


def test_ids_are_32_hex_digits_in_the_order_of_their_making() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", made) for made in ids)
    assert ids == sorted(set(ids))


def test_threads_never_make_the_same_id() -> None:
    made: list[str] = []

    def make() -> None:
        made.extend([new_id() for _ in range(5_000)])

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8 * 5_000


def test_a_clock_that_stands_still_makes_no_two_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.time, "time_ns", lambda: 1_700_000_000_000_000_000)
    assert len({new_id() for _ in range(50_000)}) == 50_000


def test_a_forked_child_is_somebody_else() -> None:
    """Told apart by the last 10 digits, whatever their clocks and counts say."""
    said = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, check=True, timeout=60
    )
    makers = [made[-10:] for made in said.stdout.split()]
    assert len(makers) == 6
    assert len(set(makers[:3])) == len(set(makers[3:])) == 1
    assert makers[0] != makers[3]


def test_two_processes_are_two_makers() -> None:
    code = "from tracegrad.events import new_id; print(new_id()[-10:])"
    makers = {
        subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
        for _ in range(3)
    }
    assert len(makers) == 3
