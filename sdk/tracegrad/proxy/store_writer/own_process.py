"""A proxy's link to a process that writes for it alone, which it starts, and starts again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from tracegrad.proxy.store_writer.process import WriterProcess

log = logging.getLogger("tracegrad.proxy")

# Before another process is started: at once after one that answered anything, else doubling.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
# For a process whose end was seen by its socket: it may still say why.
_LAST_WORDS_S = 1.0

Start = Callable[[], WriterProcess]


class OwnProcess:
    """A `WriterLink`."""

    wants_opening = True
    missed_at_start = 24  # a busy machine takes its time for an interpreter

    def __init__(self, process: WriterProcess, start: Start = WriterProcess.start) -> None:
        """`start` gives the next process where one ends."""
        self.process = process
        self._start = start
        self._silent_ends = self._failures = 0  # since anything was heard

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def connection(self) -> socket.socket:
        return self.process.connection

    async def gone(self) -> None:
        await asyncio.to_thread(self._end)
        how = self.process.how_it_ended()
        log.error("the store's writer (process %d) %s; it is started again", self.pid, how)

    def _end(self) -> None:
        """It may have ended already, or be about to."""
        self.finish(_LAST_WORDS_S)
        self.process.hang_up()

    async def renew(self, *, answered: bool) -> None:
        if answered:
            self._silent_ends = self._failures = 0
        if self._silent_ends:
            await self._pause()
        self._silent_ends += 1
        while True:
            try:
                self.process = self._start()
            except Exception as error:
                log.error("the store's writer cannot be started: %s", error)
                await self._pause()
            else:
                return

    async def _pause(self) -> None:
        pause_s = _FIRST_PAUSE_S * 2.0 ** min(self._failures, 10)
        self._failures += 1
        await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    def kill(self) -> None:
        self.process.kill()

    def finish(self, limit_s: float) -> None:
        self.process.finish(limit_s)
