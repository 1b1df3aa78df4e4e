"""One worker: a whole proxy whose connections, and whose gate, the supervisor has."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import uvicorn

from tracegrad.events import Json
from tracegrad.host_memory import tune_gc
from tracegrad.log_format import write_json_log
from tracegrad.proxy.app import WorkerLinks, create_app, writer_opening
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate
from tracegrad.proxy.http.limits import ConnectionLimits, raise_file_limit
from tracegrad.proxy.http.protocol import server_config
from tracegrad.proxy.metrics.counters import MetricCells, ProxyMetrics
from tracegrad.proxy.shared_counts import SharedCount, SharedCounts
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.proxy.store_writer.client import StoreWriter, WriterLink
from tracegrad.proxy.store_writer.own_process import OwnProcess
from tracegrad.proxy.store_writer.process import WriterProcess
from tracegrad.proxy.store_writer.shared_process import SharedProcess
from tracegrad.proxy.workers.channel import Channel, ChannelClosed
from tracegrad.proxy.workers.group_gate import GroupGate
from tracegrad.proxy.workers.group_requests import GateNow
from tracegrad.store import Store

log = logging.getLogger("tracegrad.proxy")

# Rows of the shared counts: connections that a worker has closed, turns of its event loop, then
# calls at each upstream.
CLOSED, HEARTBEATS = 0, 1
_FIRST_UPSTREAM = 2
# Between two looks at what others did, where no request comes: their rings must not overtake us.
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Seat:
    """What the supervisor gives a worker. `number` from 0."""

    number: int
    settings: ProxySettings
    channel: Channel
    gate: GateNow
    shared: SharedLog
    counts: SharedCounts
    writer_line: socket.socket | None  # of `store_writer.shared_process`; None: a writer of its own
    metrics: MetricCells


def worker_settings(settings: ProxySettings) -> ProxySettings:
    """What one worker may take up: its part of what the proxy may."""
    parts = {
        name: -(-getattr(settings, name) // settings.workers)
        for name in ("max_connections", "max_waiting", "max_bodies_mib")
    }
    return settings.model_copy(update=parts)


def run_worker(seat: Seat) -> None:
    """Until SIGTERM, or the supervisor's end."""
    _on_signals(lambda *_: sys.exit(0))
    link: WriterLink
    if seat.writer_line is None:
        link = OwnProcess(WriterProcess.fork())
    else:
        link = SharedProcess(seat.writer_line)
    if seat.settings.log_format == "json":
        write_json_log("worker", worker=seat.number)
    settings = worker_settings(seat.settings)
    # One that is away just now is answered with 503, as by workers that were there before.
    store = Store.attach(settings.store)
    limits = ConnectionLimits.of(settings)
    limits = replace(limits, connections=raise_file_limit(limits.connections))
    opening = writer_opening(settings, worker=seat.number)
    with store, StoreWriter(link, opening) as writer:
        gate = WeightUpdateGate(
            seat.gate.version,
            held=seat.gate.held_for(time.monotonic()) is not None,
            lacks_version=seat.gate.lacks_version,
            max_waiting=settings.max_waiting,
            max_wait_s=settings.max_wait_s,
        )
        gate.pushes = gate.pushes or seat.gate.pushes
        gate.versions, gate.canary = dict(seat.gate.versions), seat.gate.canary
        metrics = ProxyMetrics(seat.metrics, seat.number)
        group = GroupGate(seat.channel.send, gate, writer)
        rows = range(_FIRST_UPSTREAM, upstream_rows(settings.upstreams))
        links = WorkerLinks(
            log=seat.shared,
            in_flight=[seat.counts.count(row, seat.number) for row in rows],
            gate=gate,
            pushes=group,
            metrics=metrics,
            health=group.health,
        )
        app = create_app(settings, store=store, writer=writer, links=links)
        tune_gc()
        server = WorkerServer(server_config(app, limits), seat, gate, group, metrics)
        # uvicorn passes signals on when it has shut down; the writer and the store come after that.
        _on_signals(server.handle_exit)
        server.run(sockets=[])


def _on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


class WorkerServer(uvicorn.Server):
    """Serves the connections that the supervisor hands on."""

    def __init__(
        self,
        config: uvicorn.Config,
        seat: Seat,
        gate: WeightUpdateGate,
        group: GroupGate,
        metrics: ProxyMetrics,
    ) -> None:
        super().__init__(config)
        self._metrics = metrics
        self._seat = seat
        self._gate = gate
        self._group = group
        self._closed = seat.counts.count(CLOSED, seat.number)
        self._heartbeats = seat.counts.count(HEARTBEATS, seat.number)
        self._adopting: set[asyncio.Task[None]] = set()
        self._out_of_files = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._protocol = _counted(self.config.http_protocol_class, self._closed)
        self._seat.shared.join(self._seat.number)
        if (left := self._seat.gate.runs_out_in(time.monotonic())) is not None:
            await self._gate.hold(ttl_s=left, drain_s=0)
        for upstream, until in self._seat.gate.holds:
            if (left := until - time.monotonic()) > 0:
                await self._gate.hold(ttl_s=left, drain_s=0, upstream=upstream)
        asyncio.get_running_loop().add_reader(self._seat.channel.fileno(), self._readable)
        self._say({"ready": os.getpid()})

    async def on_tick(self, counter: int) -> bool:
        self._heartbeats.add(1)
        self._seat.channel.flush()
        if counter % _TICKS == 0:
            self._seat.shared.catch_up()
            self._metrics.sample()  # for whichever worker is asked
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._say({"closing": True})
        await super().shutdown(sockets=sockets)

    def _say(self, message: Json) -> None:
        self._seat.channel.send(message)

    def _readable(self) -> None:
        try:
            while (found := self._seat.channel.receive()) is not None:
                if found.connection is not None:
                    self._out_of_files = False
                    task = asyncio.get_running_loop().create_task(self._adopt(found.connection))
                    self._adopting.add(task)
                    task.add_done_callback(self._adopting.discard)
                elif found.lost:
                    if not self._out_of_files:  # once, and not for each of a thousand
                        log.error("connections are dropped: this worker has no file left for them")
                    self._out_of_files = True
                    self._closed.add(1)
                elif found.message is not None:
                    self._group.received(found.message)
        except ChannelClosed:
            asyncio.get_running_loop().remove_reader(self._seat.channel.fileno())
            self._group.closed()
            if not self.should_exit:
                log.error("the proxy's supervisor has ended; worker %d ends", os.getpid())
            self.should_exit = True

    async def _adopt(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        made: Any = self._protocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        try:
            connection.setblocking(False)
            await loop.connect_accepted_socket(lambda: made, connection)
        except OSError:  # its client has left already
            connection.close()
            if made.transport is None:
                self._closed.add(1)
            return
        if self.should_exit:
            made.shutdown()


def _counted(protocol: type[Any], closed: SharedCount) -> type[Any]:
    class CountedConnection(protocol):  # type: ignore[misc]
        """Says when it is closed: the supervisor gives the next to whoever has the fewest."""

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            closed.add(1)

    return CountedConnection


def upstream_rows(urls: Sequence[str]) -> int:
    """How many rows of shared counts the workers need."""
    return _FIRST_UPSTREAM + len(urls)
