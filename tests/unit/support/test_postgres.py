"""The tests' own PostgreSQL server leaves nothing behind, whatever becomes of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.store import postgres_server

_RUN = """
import sys, time
from support.store import postgres_server
with postgres_server.running() as server:
    print(server.process.pid, server.folder, flush=True)
    server.say("SELECT 1")
    time.sleep(100)
"""


@contextmanager
def running_tests() -> Iterator[subprocess.Popen[str]]:
    folder = str(Path(postgres_server.__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", _RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": folder},
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def gone(pid: int, folder: Path, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists() and not folder.exists():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_the_tests_however_they_end(how: signal.Signals) -> None:
    with running_tests() as child:
        assert child.stdout is not None
        pid, folder = child.stdout.readline().split()
        assert Path(f"/proc/{pid}").exists()
        # As a terminal does: to the whole group.
        os.killpg(child.pid, how)
        assert gone(int(pid), Path(folder))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made now; everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="tg-") as name:
        Path(name).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(postgres_server, "_FAST", ("no_such_setting=1",))
    with pytest.raises(RuntimeError, match="no_such_setting"), postgres_server.running():
        pass
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(postgres_server, "_ROLE", "")
    with pytest.raises(subprocess.CalledProcessError), postgres_server.running():
        pass
    assert list(folder.iterdir()) == []
