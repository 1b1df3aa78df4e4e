"""`python -m tracegrad.resend FILE...`: deliver events that an earlier process had to set aside.

Each file that the proxy at TRACEGRAD_URL has taken is removed. Exit code 1 if one remains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tracegrad import context
from tracegrad.client import EVENTS_PER_REQUEST, Outbox, Refused, Unreachable


def resend(paths: Iterable[Path], url: str) -> int:
    """Send files of undelivered events to the proxy at `url`, removing each that arrived.

    Returns:
        How many events were delivered.

    Raises:
        Unreachable: the proxy did not answer; the file stays, and may be sent again as it is.
        Refused: the proxy refuses an event; the message is its reason.
        OSError: a file cannot be read.
    """
    outbox = Outbox(url)
    delivered = 0
    for path in paths:
        lines = path.read_bytes().splitlines()
        for start in range(0, len(lines), EVENTS_PER_REQUEST):
            batch = lines[start : start + EVENTS_PER_REQUEST]
            outbox.post("/api/events", b'{"events":[%b]}' % b",".join(batch), "application/json")
            delivered += len(batch)
        path.unlink()
    return delivered


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:]]
    if not paths:
        sys.exit("usage: python -m tracegrad.resend FILE...")
    try:
        delivered = resend(paths, context.proxy_url())
    except (Unreachable, Refused, OSError, ValueError) as error:
        sys.exit(f"not every event was delivered: {error}")
    print(f"{delivered} events delivered")


if __name__ == "__main__":
    main()
