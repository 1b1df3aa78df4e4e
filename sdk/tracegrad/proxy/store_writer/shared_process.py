"""A worker's link to the process that writes for all workers of its proxy.

Their supervisor starts it, and starts it again. It gives each worker its connection on a *line*, a
pair of sockets for that alone: a message is the process' number, with the connection in it. A
worker that had no file left for it asks again there.
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

ASK_AGAIN = b"again"
_LONGEST = 64  # bytes of a message
_READ_BYTES = 1 << 16
_ASK_AGAIN_S = 0.2
# For the end of a process that was killed.
_KILLED_S = 5.0


class SharedProcess:
    """A `WriterLink`. `line`: the worker's end."""

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        self.pid = 0
        self.connection: socket.socket | None = None

    async def gone(self) -> None:
        # Nobody else has the other end: a process that has closed it has no file any more.
        self._close()

    async def renew(self, *, answered: bool) -> None:
        while self.connection is None:
            try:
                self._receive()
            except BlockingIOError:
                await self._readable()
            except EOFError:  # the supervisor has ended: there will be no other process
                await asyncio.get_running_loop().create_future()
            except OSError as error:
                log.error("the store's writer cannot be reached: %s", error)
                await asyncio.sleep(_ASK_AGAIN_S)
                with suppress(OSError):
                    self._line.send(ASK_AGAIN)

    def _receive(self) -> None:
        """The latest that was sent; those before have ended."""
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self._line, _LONGEST, 1)
            except BlockingIOError:
                if self.connection is None:
                    raise
                return
            if not data:
                raise EOFError
            if not files:
                raise OSError("this worker has no file left for it")
            self._close()
            self.pid, self.connection = int(data), socket.socket(fileno=files[0])

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._line.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._line.fileno())

    def _close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def kill(self) -> None:
        """While it has not hung up its number is no other's."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def finish(self, limit_s: float) -> None:
        """A process that has not hung up by then would write, at some time, what nobody knows of:
        it is killed, as one of our own would be, and others get the next."""
        if self.connection is not None and not self._hangs_up(limit_s):
            self.kill()
            self._hangs_up(_KILLED_S)
        self._close()
        self._line.close()

    def _hangs_up(self, limit_s: float) -> bool:
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
