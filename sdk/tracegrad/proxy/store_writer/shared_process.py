"""A worker's link to the process that writes for all workers of its proxy.

Their supervisor starts it, and starts it again. A worker asks it for a connection by its *line*, a
pair of sockets for that alone; the answer is the process' number, with the connection in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import suppress

log = logging.getLogger("tracegrad.proxy")

ASK = b"connect"
_LONGEST = 64  # bytes of a message
_READ_BYTES = 1 << 16
_ASK_AGAIN_S = 0.2
# For what a process has still to do with a connection that was lost, as our own has for its end.
_LAST_WORDS_S = 1.0
# For the end of a process that was killed.
_KILLED_S = 5.0


class SharedProcess:
    """A `WriterLink`. `line`: the worker's end."""

    wants_opening = False
    missed_at_start = 0  # it is a fork

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        self.pid = 0
        self.connection: socket.socket | None = None

    async def gone(self) -> None:
        await asyncio.to_thread(self._end, _LAST_WORDS_S)

    async def renew(self, *, answered: bool) -> None:
        if not answered:
            await asyncio.sleep(_ASK_AGAIN_S)
        while True:
            try:
                return await self._connect()
            except OSError as error:
                log.error("the store's writer cannot be reached: %s", error)
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _connect(self) -> None:
        with suppress(OSError):  # of a supervisor that has ended
            self._line.send(ASK)
        while True:
            await self._readable()
            with suppress(BlockingIOError):
                data, files, _, _ = socket.recv_fds(self._line, _LONGEST, 1)
                break
        if files:
            self.pid, self.connection = int(data), socket.socket(fileno=files[0])
        elif data:
            raise OSError("this worker has no file left for it")
        else:  # there will be no other process, and the worker is about to end
            await asyncio.get_running_loop().create_future()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._line.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._line.fileno())

    def kill(self) -> None:
        if not self._hangs_up(0):  # its number may be another's by now
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def finish(self, limit_s: float) -> None:
        self._end(limit_s)
        self._line.close()

    def _end(self, limit_s: float) -> None:
        """Of what it was sent by this connection. A process that has not hung up by then would
        write, at some time, what nobody knows of: it is killed, as one of our own would be, and
        others get the next."""
        if self.connection is None:
            return
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        if not self._hangs_up(limit_s):
            self.kill()
            self._hangs_up(_KILLED_S)
        self.connection.close()
        self.connection = None

    def _hangs_up(self, limit_s: float) -> bool:
        """What it answers meanwhile is lost, and written again."""
        assert self.connection is not None, "connected"
        deadline = time.monotonic() + limit_s
        try:
            while True:
                self.connection.settimeout(max(0.001, deadline - time.monotonic()))
                if not self.connection.recv(_READ_BYTES):
                    return True
        except TimeoutError:
            return False
        except OSError:  # it ended with words of ours that it had not read
            return True
