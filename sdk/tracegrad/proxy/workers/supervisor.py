"""The process that owns the port: starts workers, hands connections on, ends with all of them.

It has no event loop and no threads, so that it can fork at any time. Connections go to the worker
that has the fewest: clients keep theirs open, and one worker that took most of them would be the
limit of all.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from tracegrad.events import Json
from tracegrad.proxy.app import metric_cells, writer_opening
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.protocol import SHUTDOWN_S
from tracegrad.proxy.shared_counts import SharedCounts
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.proxy.store_writer.process import how_it_ended
from tracegrad.proxy.workers.channel import Channel, ChannelClosed
from tracegrad.proxy.workers.group_requests import GateNow, GroupRequests
from tracegrad.proxy.workers.group_writer import GroupWriter
from tracegrad.proxy.workers.restarts import STABLE_S, pause_before_start
from tracegrad.proxy.workers.worker import (
    CLOSED,
    HEARTBEATS,
    Seat,
    run_worker,
    upstream_rows,
)

log = logging.getLogger("tracegrad.proxy")

# A worker whose event loop does not turn is killed after so many looks, half a minute: clients wait
# for it. Looks and not time: a supervisor that was stopped itself (Ctrl-Z) blames nobody.
LOOK_EVERY_S = 5.0
MISSED_LOOKS = 6
# After the time that calls in flight get at the end, until a worker is killed.
_KILL_S = SHUTDOWN_S + 10.0
_PLACE_AGAIN_S = 0.02
_ACCEPTS = 64  # connections at a time


@dataclass(slots=True)
class _Worker:
    number: int
    pid: int | None = None
    channel: Channel | None = None
    ready_at: float | None = None
    accepts: bool = False
    given: int = 0  # connections
    failures: int = 0
    heartbeats: int = 0  # as seen last
    missed: int = 0  # looks since they changed
    start_at: float = field(default=0.0)  # where it has no process


class Supervisor:
    def __init__(
        self,
        settings: ProxySettings,
        listener: socket.socket,
        *,
        version: int,
        announce: Callable[[], None],
    ) -> None:
        """`version`: the policy version that is served. `announce` is called when all workers
        serve."""
        self._settings = settings
        self._listener = listener
        self._announce = announce
        self._announced = False
        self._workers = [_Worker(number) for number in range(settings.workers)]
        self._shared = SharedLog(settings.workers)
        self._counts = SharedCounts(settings.workers, upstream_rows(settings.upstreams))
        self._metrics = metric_cells(settings)
        held = settings.held
        gate = GateNow(version, held=held, lacks_version=held, pushes=held)
        self._requests = GroupRequests(self._send, gate)
        self._unplaced: deque[socket.socket] = deque()
        self._selector = selectors.DefaultSelector()
        # Of a database server each worker has a process of its own.
        self._writer: GroupWriter | None = None
        if settings.store.get_secret_value().startswith("sqlite"):
            self._writer = GroupWriter(writer_opening(settings), self._selector)
        self._listening = self._out_of_files = False
        self._look_at = 0.0
        self._signals: list[int] = []
        self._stop_at: float | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Until a signal ends it, or a worker that cannot start does. The exit status; that of a
        signal is negative."""
        self._listener.setblocking(False)
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(4096))
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _: self._signals.append(got))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while self._code is None or any(worker.pid for worker in self._workers):
            self._start_due()
            self._listen()
            for key, _ in self._selector.select(self._pause()):
                key.data()
            self._obey()
            self._reap()
            self._end_late()
            self._end_silent()
            self._place()
        if self._writer is not None:
            self._writer.end()
        return self._code

    # Workers

    def _start_due(self) -> None:
        if self._writer is not None:
            self._writer.advance()
        for worker in self._workers:
            if worker.pid is None and self._code is None and worker.start_at <= time.monotonic():
                self._start(worker)

    def _start(self, worker: _Worker) -> None:
        try:
            line = None if self._writer is None else self._writer.line(worker.number)
            ours, theirs = Channel.pair()
        except OSError as error:
            self._start_later(worker, f"worker {worker.number} has no channel ({error})")
            return
        self._counts.reset(worker.number)
        worker.given, worker.ready_at, worker.accepts = 0, None, False
        worker.heartbeats = worker.missed = 0
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            for end in (ours, theirs, line):
                if end is not None:
                    end.close()
            self._start_later(worker, f"worker {worker.number} has no process ({error})")
            return
        if pid == 0:
            ours.close()
            self._become(worker.number, theirs, line)
        theirs.close()
        if line is not None:
            line.close()
        worker.pid, worker.channel = pid, ours
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear(worker))

    def _become(self, number: int, channel: Channel, line: socket.socket | None) -> NoReturn:
        """In the fork: nothing of the supervisor's stays open, so that the others see it end."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._listener.close()
            for other in self._workers:
                if other.channel is not None:
                    other.channel.close()
            for connection in self._unplaced:
                connection.close()
            if self._writer is not None:
                self._writer.close_lines()
            run_worker(
                Seat(
                    number,
                    self._settings,
                    channel,
                    self._requests.gate,
                    self._shared,
                    self._counts,
                    line,
                    self._metrics,
                )
            )
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            log.critical("worker %d ends", number, exc_info=True)
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Where this is the first process of a container, what killed workers left is its too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._writer is not None:
                self._writer.reaped(pid, code)
            for worker in self._workers:
                if worker.pid == pid:
                    self._ended(worker, code)

    def _ended(self, worker: _Worker, code: int) -> None:
        pid, now = worker.pid, time.monotonic()
        self._cut_off(worker)
        worker.pid = None
        self._counts.reset(worker.number)
        self._metrics.forget_gauges(worker.number)
        if worker.ready_at is not None and now - worker.ready_at >= STABLE_S:
            worker.failures = -1
        who = f"worker {worker.number} (process {pid})"
        how = how_it_ended(code)
        said = f"{who} {how}" if self._announced else f"{who} did not start: it {how}"
        self._start_later(worker, said, code=code if code > 0 else 1)

    def _start_later(self, worker: _Worker, said: str, code: int = 1) -> None:
        if self._code is not None:
            return
        if not self._announced:
            log.error("%s", said)
            self._stop(code)
            return
        worker.failures += 1
        pause_s = pause_before_start(worker.failures)
        worker.start_at = time.monotonic() + pause_s
        log.error("%s; it is started again%s", said, f" in {pause_s:g} s" if pause_s else "")

    def _cut_off(self, worker: _Worker) -> None:
        if worker.channel is not None:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None
        worker.accepts = False
        self._requests.gone(worker.number)

    # What they say

    def _send(self, number: int, message: Json) -> None:
        channel = self._workers[number].channel
        if channel is not None:
            channel.send(message)

    def _hear(self, worker: _Worker) -> None:
        try:
            while worker.channel is not None and (found := worker.channel.receive()) is not None:
                if found.message is not None:
                    self._heard(worker, found.message)
        except ChannelClosed:
            self._cut_off(worker)

    def _heard(self, worker: _Worker, message: Json) -> None:
        if "ready" in message:
            worker.ready_at, worker.accepts = time.monotonic(), True
            if not self._announced and all(each.accepts for each in self._workers):
                self._announced = True
                self._announce()
        elif "closing" in message:
            worker.accepts = False
        elif "done" in message:
            self._requests.answered(worker.number, message)
        else:
            self._requests.ask(
                worker.number,
                message,
                all_=[each.number for each in self._workers if each.channel is not None],
                ready=[
                    each.number
                    for each in self._workers
                    if each.channel is not None and each.ready_at is not None
                ],
                now=time.monotonic(),
            )

    # Connections

    def _listen(self) -> None:
        """A connection that nobody could take stays in the system's queue."""
        wanted = (
            self._code is None
            and self._announced
            and not self._unplaced
            and any(worker.accepts for worker in self._workers)
        )
        if wanted and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listening and not wanted:
            self._selector.unregister(self._listener)
        self._listening = wanted

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # No files left: those who wait are served when others have gone.
                if not self._out_of_files:
                    self._out_of_files = True
                    log.error("a connection cannot be accepted: %s; it waits", error)
                time.sleep(_PLACE_AGAIN_S)
                return
            self._out_of_files = False
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._unplaced.append(connection)
            self._place()
            if self._unplaced:
                return

    def _place(self) -> None:
        while self._unplaced and self._given(self._unplaced[0]):
            self._unplaced.popleft().close()

    def _given(self, connection: socket.socket) -> bool:
        able = [worker for worker in self._workers if worker.accepts]
        closed = self._counts.count(CLOSED, 0)

        def last_resort(each: _Worker) -> tuple[bool, int]:
            return each.missed > 1, each.given - closed.of(each.number)

        for worker in sorted(able, key=last_resort):
            if worker.channel is not None and worker.channel.send_connection(connection):
                worker.given += 1
                return True
        return False

    # The end

    def _obey(self) -> None:
        for number in self._signals:
            if self._code is None:
                self._stop(0 if number == signal.SIGINT else -number)
            else:
                self._signal_all(signal.SIGINT)  # uvicorn's word for: at once
        self._signals.clear()

    def _stop(self, code: int) -> None:
        self._code = code
        self._stop_at = time.monotonic() + _KILL_S
        self._listen()
        self._listener.close()
        while self._unplaced:
            self._unplaced.popleft().close()
        self._signal_all(signal.SIGTERM)

    def _end_late(self) -> None:
        now = time.monotonic()
        for number in self._requests.overdue(now):
            worker = self._workers[number]
            log.error("worker %d does not answer, and is killed", number)
            self._cut_off(worker)
            self._signal(worker, signal.SIGKILL)
        if self._stop_at is not None and now > self._stop_at:
            self._signal_all(signal.SIGKILL)

    def _end_silent(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        heartbeats = self._counts.count(HEARTBEATS, 0)
        for worker in self._workers:
            if worker.channel is None or worker.ready_at is None:
                continue
            seen = heartbeats.of(worker.number)
            worker.missed = worker.missed + 1 if seen == worker.heartbeats else 0
            worker.heartbeats = seen
            if worker.missed >= MISSED_LOOKS:
                log.error(
                    "worker %d (process %d) does nothing any more, and is killed",
                    worker.number,
                    worker.pid,
                )
                self._cut_off(worker)
                self._signal(worker, signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            self._signal(worker, number)

    def _signal(self, worker: _Worker, number: int) -> None:
        if worker.pid is not None:
            os.kill(worker.pid, number)

    def _pause(self) -> float | None:
        """Seconds until something is due."""
        due = [self._requests.next_deadline(), self._stop_at, self._look_at]
        if self._code is None:
            due += [worker.start_at for worker in self._workers if worker.pid is None]
        if self._writer is not None:
            due.append(self._writer.start_at)
        times = [each - time.monotonic() for each in due if each is not None]
        blocked = any(
            worker.channel is not None and worker.channel.is_blocked for worker in self._workers
        )
        if self._writer is not None and self._writer.is_asked:
            times.append(_PLACE_AGAIN_S)
        if blocked or self._unplaced:
            for worker in self._workers:
                if worker.channel is not None:
                    worker.channel.flush()
            times.append(_PLACE_AGAIN_S)
        return max(0.0, min(times)) if times else None
