"""Workers are started, started again, and ended with their supervisor."""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from support.engines.mock_engine import Answer
from support.proxy.servers import eventually
from support.proxy.workers import Workers, exists, two_workers
from support.system.log_lines import our_lines
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.workers.channel import Channel
from tracegrad.proxy.workers.group_requests import ANSWER_S
from tracegrad.proxy.workers.restarts import LONGEST_PAUSE_S, pause_before_start
from tracegrad.proxy.workers.supervisor import MISSED_LOOKS, Supervisor
from tracegrad.proxy.workers.worker import CLOSED, HEARTBEATS

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


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_what_the_supervisor_says_is_json_on_request(sqlite_url: str, tmp_path: Path) -> None:
    with two_workers(sqlite_url, tmp_path, log_format="json") as workers:
        [killed, _] = before = workers.pids()
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(found := workers.pids()) == 2 and found != before, 60)
    lines = workers.proxy.log.read_text().splitlines()
    said = [json.loads(line) for line in lines if not line.startswith("tracegrad proxy on ")]
    assert len(lines) - len(said) == 1, "for people, on standard output"
    [end] = [line for line in said if "was ended by SIGKILL" in line["message"]]
    assert (end["role"], end["level"]) == ("proxy", "ERROR")


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
    with workers.client_elsewhere(kept) as again:
        asked = len(workers.engine.requests)
        workers.chat(again, [{"role": "user", "content": "before"}], "r", retry)
        assert len(workers.engine.requests) == asked
    assert len(workers.store.rollout_turns("r")) == 2


# Looks at the workers that come often, and enough of them for a busy machine.
OFTEN = {
    "tracegrad.proxy.workers.supervisor.LOOK_EVERY_S": 0.1,
    "tracegrad.proxy.workers.supervisor.MISSED_LOOKS": 50,
}


def test_a_worker_that_is_stopped_is_killed_and_holds_nobody_for_good(
    sqlite_url: str, tmp_path: Path
) -> None:
    with two_workers(sqlite_url, tmp_path, OFTEN) as workers:
        first, second = workers.clients
        stopped = workers.pid_of(first)
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(httpx.TransportError):  # its client sees its end
            first.get("/healthz")
        workers.chat(second, [{"role": "user", "content": "hi"}], "r")
        eventually(lambda: stopped not in (found := workers.pids()) and len(found) == 2, 60)
        assert not exists(stopped)
        said = workers.proxy.log.read_text()
        assert f"worker 0 (process {stopped}) does nothing any more, and is killed" in said or (
            f"worker 1 (process {stopped}) does nothing any more, and is killed" in said
        )


def test_a_supervisor_that_was_stopped_itself_blames_no_worker(
    listener: socket.socket,
) -> None:
    supervisor = Supervisor(ProxySettings(workers=2), listener, version=0, announce=lambda: None)
    worker = supervisor._workers[1]
    channel, other = Channel.pair()
    supervisor._selector.register(channel, selectors.EVENT_READ)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        worker.pid, worker.channel, worker.ready_at = process.pid, channel, 0.0
        heartbeats = supervisor._counts.count(HEARTBEATS, 1)
        for _ in range(2):
            heartbeats.add(1)
            for missed in range(MISSED_LOOKS):
                supervisor._look_at = 0.0  # however late it is
                supervisor._end_silent()
                supervisor._end_silent()  # not a look
                assert (worker.missed, process.poll()) == (missed, None)
        supervisor._look_at = 0.0
        supervisor._end_silent()
        assert process.wait(30) == -signal.SIGKILL
    other.close()


@pytest.mark.parametrize("why", ["no answer", "no end"])
def test_a_worker_that_does_not_do_as_it_must_is_killed(
    listener: socket.socket, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(ProxySettings(workers=2), listener, version=0, announce=lambda: None)
    worker = supervisor._workers[1]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        worker.pid = process.pid
        now = time.monotonic()
        if why == "no answer":
            monkeypatch.setattr(time, "monotonic", lambda: now + ANSWER_S)
            ask = {"ask": "release", "args": {}, "number": 1}
            supervisor._requests.ask(0, ask, all_=[0, 1], ready=[1], now=now)
        else:
            supervisor._stop_at = now - 1
        supervisor._end_late()
        monkeypatch.undo()
        assert process.wait(30) == -signal.SIGKILL


def test_a_worker_that_only_starts_is_told_of_a_push_and_not_waited_for(
    listener: socket.socket,
) -> None:
    supervisor = Supervisor(ProxySettings(workers=2), listener, version=0, announce=lambda: None)
    serving, starting = supervisor._workers
    serving.channel, theirs = Channel.pair()
    starting.channel, its = Channel.pair()
    serving.ready_at = 0.0
    supervisor._heard(serving, {"ask": "release", "args": {}, "number": 5})
    told = {"do": "release", "args": {}, "number": 1}
    assert theirs.receive() == its.receive() == (told, None, False)
    supervisor._heard(serving, {"done": "release", "number": 1, "result": None})
    assert theirs.receive() == ({"answer": 5, "results": [None]}, None, False)


def test_a_connection_goes_to_who_has_the_fewest_of_those_that_move(
    listener: socket.socket,
) -> None:
    supervisor = Supervisor(ProxySettings(workers=2), listener, version=0, announce=lambda: None)
    first, second = supervisor._workers
    first.channel, one = Channel.pair()
    second.channel, other = Channel.pair()
    first.accepts = second.accepts = True
    second.given = 5
    client, connection = socket.socketpair()
    with client, connection:

        def given() -> tuple[int, int]:
            assert supervisor._given(connection)
            return first.given, second.given

        assert given() == (1, 5)
        first.missed = 2
        assert given() == (1, 6)
        first.missed = 1  # a look may come between two turns of its loop
        assert given() == (2, 6)
        supervisor._counts.count(CLOSED, 1).add(6)
        assert given() == (2, 7)
        second.accepts = False
        assert given() == (3, 7)
    for end in (one, other):
        end.close()


def test_a_worker_starts_while_the_store_is_away(sqlite_url: str, tmp_path: Path) -> None:
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    away = tmp_path / "away"
    away.mkdir()
    hello = {"messages": [{"role": "user", "content": "hi"}]}
    with two_workers(sqlite_url, tmp_path) as workers:
        workers.chat(workers.clients[0], [*hello["messages"]], "r")
        moved = list(file.parent.glob(f"{file.name}*"))
        for path in moved:
            path.rename(away / path.name)
        killed = workers.pids()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: workers.answers() and not {*killed} & {*workers.pids()}, 60)
        url = f"{workers.proxy.url}/rollouts/r/v1/chat/completions"
        answer = httpx.post(url, json=hello, timeout=60)
        assert answer.status_code == 503
        assert "the store cannot be written" in answer.json()["error"]["message"]
        assert not file.exists(), "none is made in its place"
        for path in moved:
            (away / path.name).rename(path)
        assert httpx.post(url, json=hello, timeout=60).status_code == 200
        assert len(workers.store.rollout_turns("r")) == 2


def test_a_worker_may_be_ended_by_any_signal(workers: Workers) -> None:
    killed = workers.pids()[0]
    os.kill(killed, 40)  # one of those that have no name
    eventually(lambda: killed not in (found := workers.pids()) and len(found) == 2, 60)
    assert "was ended by signal 40; it is started again" in workers.proxy.log.read_text()


def test_pauses_before_a_start_grow_and_end() -> None:
    assert [pause_before_start(failures) for failures in range(5)] == [0, 0, 0.4, 0.8, 1.6]
    assert pause_before_start(5000) == LONGEST_PAUSE_S  # of half a day without a store


@pytest.mark.parametrize("missing", ["fork", "socketpair"])
def test_where_no_worker_can_be_started_others_go_on_and_it_is_tried_again(
    missing: str,
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    supervisor = Supervisor(ProxySettings(workers=2), listener, version=0, announce=lambda: None)
    monkeypatch.setattr(os if missing == "fork" else socket, missing, refuse)
    worker = supervisor._workers[1]
    supervisor._announced = True
    for pause_s in (0, 0.4):
        now = time.monotonic()
        supervisor._start(worker)
        assert worker.start_at >= now + pause_s
    assert worker.pid is worker.channel is supervisor._code is None
    supervisor._announced = False  # nobody serves yet: the proxy does not start
    supervisor._start(worker)
    assert supervisor._code == 1
    said = our_lines(caplog)[:2]
    assert said[0].endswith("; it is started again")
    assert said[1].endswith("; it is started again in 0.4 s")


def test_no_worker_outlives_its_supervisor(workers: Workers) -> None:
    pids = workers.processes()
    os.kill(workers.proxy.pid, signal.SIGKILL)
    eventually(lambda: not any(map(exists, pids)), 60)
    address = urlsplit(workers.proxy.url)
    socket.create_server((address.hostname, address.port)).close()  # the port is free


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_in_order(workers: Workers, number: int) -> None:
    pids = workers.processes()
    workers.chat(workers.clients[0], [{"role": "user", "content": "hi"}], "r")
    os.kill(workers.proxy.pid, number)
    eventually(lambda: not any(map(exists, [*pids, workers.proxy.pid])), 60)
    assert "Traceback" not in workers.proxy.log.read_text()
    assert len(workers.store.rollout_turns("r")) == 1


def test_a_second_signal_cuts_calls_off_and_what_they_had_is_recorded(workers: Workers) -> None:
    everyone = [*workers.processes(), workers.proxy.pid]
    workers.engine.replies.append(Answer("0123456789"))
    workers.engine.wait_before(2)
    body = {"messages": [{"role": "user", "content": "Tell."}], "stream": True}
    path = "/rollouts/r/v1/chat/completions"
    with workers.clients[0].stream("POST", path, json=body) as answer:
        lines = answer.iter_lines()
        while "4567" not in next(lines):
            pass
        os.kill(workers.proxy.pid, signal.SIGTERM)
        eventually(lambda: not workers.answers(), 60)
        with suppress(ProcessLookupError):  # a busy machine may have taken the call's 5 s by now
            os.kill(workers.proxy.pid, signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            list(lines)
    eventually(lambda: not any(map(exists, everyone)), 60)
    assert "Traceback" not in workers.proxy.log.read_text()
    [turn] = workers.store.rollout_turns("r")
    assert (turn.untrainable, len(turn.completion_token_ids)) == ("aborted", 8)


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
