"""`python -m tracegrad.resend [FILE...]`: deliver what earlier processes left.

Without arguments: the journals of processes that ended, for the proxy at TRACEGRAD_URL; every
process that records to the same proxy does that too. With files: events that the proxy refused
(`refused.jsonl`), once its reason is gone. What has arrived is removed. Exit code 1 if something
remains.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tracegrad import context
from tracegrad.exporter import BYTES_PER_REQUEST, RECORDS_PER_REQUEST, post_records
from tracegrad.journal import drop_torn_record, journal_folder, orphaned_journals
from tracegrad.transport import ProxyRefused, ProxyUnreachable, Transport


def resend(paths: Iterable[Path], url: str) -> int:
    """Send files of events to the proxy at `url`, removing each that arrived.

    Returns:
        How many events were delivered.

    Raises:
        ProxyUnreachable: the proxy did not answer; the file stays, and may be sent again as it is.
        ProxyRefused: the proxy refuses an event; the message is its reason.
        OSError: a file cannot be read.
    """
    transport = Transport(url)
    delivered = 0
    for path in paths:
        delivered += _send(transport, _batches(path.read_bytes().splitlines()))
        path.unlink()
    return delivered


def resend_journals(url: str) -> int:
    """Send the journals that ended processes left for the proxy at `url`; else like `resend`."""
    transport = Transport(url)
    delivered = 0
    for journal in orphaned_journals(journal_folder(url)):
        try:
            delivered += _send(transport, journal.batches(RECORDS_PER_REQUEST, BYTES_PER_REQUEST))
            journal.remove()
        finally:
            journal.close()
    return delivered


def _send(transport: Transport, batches: Iterable[list[bytes]]) -> int:
    delivered = 0
    for records in batches:
        complete = drop_torn_record(records)
        post_records(transport, complete)
        delivered += len(complete)
    return delivered


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    remaining = iter(lines)
    while batch := list(itertools.islice(remaining, RECORDS_PER_REQUEST)):
        yield batch


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:]]
    try:
        url = context.proxy_url()
        delivered = resend(paths, url) if paths else resend_journals(url)
    except (ProxyUnreachable, ProxyRefused, OSError, ValueError) as error:
        sys.exit(f"not every event was delivered: {error}")
    print(f"{delivered} events delivered")


if __name__ == "__main__":
    main()
