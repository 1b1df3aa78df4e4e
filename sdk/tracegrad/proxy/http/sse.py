"""Server-sent events: taking a stream apart, putting one together."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


class EventBuffer:
    """Splits bytes, however they were cut, into whole events."""

    def __init__(self) -> None:
        self.rest: list[bytes] = []  # the beginning of an event, which waits for its end

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each without the empty line that ends it."""
        if not self.rest and data.find(b"\n") == len(data) - 2 and data.endswith(b"\n"):
            return [data[:-2]]  # one, as most come: the search for two line ends is slow
        if b"\n" not in data:  # a large event comes in many pieces: they are joined once
            if data:
                self.rest.append(data)
            return []
        whole = b"".join((*self.rest, data)) if self.rest else data
        if b"\r" in whole:  # some servers end their lines so; JSON has no raw line ends
            whole = whole.replace(b"\r\n", b"\n")
        events = whole.split(b"\n\n")
        last = events.pop()
        self.rest = [last] if last else []
        return events


def split_first_events(data: bytes) -> Iterator[bytes]:
    """`data` in up to three pieces, of which the first two end with an event.

    A stream's first words should not wait for the reading of all that arrived with them.
    """
    start = 0
    for _ in range(2):  # the role, then words
        end = data.find(b"\n\n", start) + 2
        if end in (1, len(data)):
            break
        yield data[start:end]
        start = end
    yield data[start:]


def event_data(event: bytes) -> bytes | None:
    """The data of an event; None for a comment, which servers send to keep a line open."""
    if event.startswith(b"data:"):
        return event[5:].strip()
    _, found, data = event.partition(b"\ndata:")
    return data.strip() if found else None


def encode_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
