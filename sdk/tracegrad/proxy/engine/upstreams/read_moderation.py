"""How often the streams of a busy engine are read.

A read costs a wake-up, two system calls and a write to the client, whatever came. Where many
streams run at once each rests for some milliseconds after a read, and what comes meanwhile is read
together, as network cards moderate their interrupts. A few streams, or slow ones, are read at once.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

# Fewer streams than this never rest. More rest so long that there are some 1,400 reads a second in
# all, and never longer than a screen takes to show something new.
_FEWEST_STREAMS = 4
_REST_PER_STREAM_S = 0.0007
_LONGEST_REST_S = 0.010


class PausableReader(Protocol):
    """aiohttp's protocol of a connection. To pause or resume twice does no harm."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class ReadModeration:
    """Of all streams of one event loop."""

    def __init__(self) -> None:
        self._streams = 0
        self._resting: set[PausableReader] = set()

    def join(self) -> None:
        """One more stream runs."""
        self._streams += 1

    def rest(self, reader: PausableReader) -> None:
        """It was read: not again before the next tick, which all that rest share."""
        if self._streams < _FEWEST_STREAMS:
            return
        if not self._resting:
            rest_s = min(self._streams * _REST_PER_STREAM_S, _LONGEST_REST_S)
            asyncio.get_running_loop().call_later(rest_s, self._wake)
        reader.pause_reading()
        self._resting.add(reader)

    def leave(self, reader: PausableReader) -> None:
        """It has ended, or somebody else reads on: at once, for a pooled connection that is not
        read does not see that its server hangs up."""
        self._streams -= 1
        if reader in self._resting:
            self._resting.discard(reader)
            reader.resume_reading()

    def _wake(self) -> None:
        resting, self._resting = self._resting, set()
        for reader in resting:
            reader.resume_reading()
