"""Between the supervisor and one worker: messages in order, some with a connection in them.

One socket for both, so that a worker has read that the gate is closed before it gets a connection
that was accepted after that.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import NamedTuple

import orjson

from tracegrad.events import Json

# Bytes of one message; what is said of a gate has a hundred.
_LONGEST = 64 << 10
_CONNECTION = b"connection"


class Received(NamedTuple):
    """A message, or a connection that a client opened. `lost`: a connection came, and this process
    has no file left for it; the system has closed it."""

    message: Json | None = None
    connection: socket.socket | None = None
    lost: bool = False


class ChannelClosed(Exception):
    """The other side has ended."""


class Channel:
    """One end; never waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent: deque[bytes] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    @property
    def is_blocked(self) -> bool:
        """Whether messages wait until the other side has read some."""
        return bool(self._unsent)

    def send(self, message: Json) -> None:
        """Now, or with a later `flush`; nowhere, when the other side has ended."""
        self._unsent.append(orjson.dumps(message))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                self._end.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            self._unsent.popleft()

    def send_connection(self, connection: socket.socket) -> bool:
        """False: the other side has ended, or is too busy to read what it was sent."""
        if self._unsent:
            return False
        try:
            socket.send_fds(self._end, [_CONNECTION], [connection.fileno()])
        except OSError:
            return False
        return True

    def receive(self) -> Received | None:
        """None: there is nothing more now. Raises ChannelClosed."""
        try:
            data, files, _, _ = socket.recv_fds(self._end, _LONGEST, 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed from error
        if files:
            return Received(connection=socket.socket(fileno=files[0]))
        if not data:
            raise ChannelClosed
        if data == _CONNECTION:
            return Received(lost=True)
        return Received(message=orjson.loads(data))
