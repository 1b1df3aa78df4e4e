"""Workers are started, started again, and ended with their supervisor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from support.proxy.servers import eventually
from support.proxy.workers import Workers, exists, two_workers

# `tracegrad proxy` whose second worker fails as this says.
_FAILING = """
import sys, typer
import tracegrad.proxy.workers.supervisor as supervisor
from tracegrad.proxy.cli import proxy_command
run = supervisor.run_worker
def run_worker(seat):
    if seat.number == 1:
        print("no luck", file=sys.stderr)
        raise SystemExit(7)
    run(seat)
supervisor.run_worker = run_worker
typer.run(proxy_command)
"""


@pytest.fixture
def workers(sqlite_url: str, tmp_path: Path) -> Iterator[Workers]:
    with two_workers(sqlite_url, tmp_path) as found:
        yield found


def test_a_killed_worker_is_started_again_and_the_other_goes_on(workers: Workers) -> None:
    first, second = workers.clients
    killed, kept = workers.pid_of(first), workers.pid_of(second)
    workers.chat(first, [{"role": "user", "content": "before"}], "r")
    os.kill(killed, signal.SIGKILL)
    workers.chat(second, [{"role": "user", "content": "after"}], "r")  # the same connection
    eventually(lambda: killed not in (found := workers.pids()) and len(found) == 2, 60)
    assert kept in workers.pids()
    assert "was ended by SIGKILL; it is started again" in workers.proxy.log.read_text()
    # The new one knows what its predecessor told: a retry of the call that it had answered.
    retry = {"x-stainless-retry-count": "1"}
    with httpx.Client(base_url=workers.proxy.url, timeout=20) as again:
        while workers.pid_of(again) == kept:
            again.get("/healthz", headers={"connection": "close"})
        asked = len(workers.engine.requests)
        workers.chat(again, [{"role": "user", "content": "before"}], "r", retry)
        assert len(workers.engine.requests) == asked
    assert len(workers.store.rollout_turns("r")) == 2


def test_no_worker_outlives_its_supervisor(workers: Workers) -> None:
    pids = workers.pids()
    os.kill(workers.proxy.pid, signal.SIGKILL)
    eventually(lambda: not any(map(exists, pids)), 60)
    address = urlsplit(workers.proxy.url)
    socket.create_server((address.hostname, address.port)).close()  # the port is free


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_in_order(workers: Workers, number: int) -> None:
    pids = workers.pids()
    workers.chat(workers.clients[0], [{"role": "user", "content": "hi"}], "r")
    os.kill(workers.proxy.pid, number)
    eventually(lambda: not any(map(exists, [*pids, workers.proxy.pid])), 60)
    assert "Traceback" not in workers.proxy.log.read_text()
    assert len(workers.store.rollout_turns("r")) == 1


def test_a_worker_that_cannot_start_ends_the_proxy(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FAILING, "--port=0", "--workers=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == ""
    assert "no luck" in ended.stderr
    assert "worker 1 (process" in ended.stderr
    assert "did not start: it exited with 7" in ended.stderr
