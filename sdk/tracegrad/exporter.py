"""Events leave an agent's process in the background, in order, exactly once.

An `EventExporter` writes every event to this process's journal where it is put, and sends the
journal to one proxy from one thread. Nothing but that thread ever uses the network: `put` neither
waits for the proxy nor raises, whatever the event holds. What the proxy has not acknowledged stays
in the journal when the process ends, in whatever way; another process that sends to the same proxy,
a living or a later one, sends it too. Sending twice does no harm: every event has its own id.
"""

from __future__ import annotations

# All that the thread below uses is imported here: a lock that it held on an unfinished import
# would never be released in a process forked meanwhile.
import atexit
import base64
import functools
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tracegrad.call_check import CallCheck, question
from tracegrad.environment import unread_variables
from tracegrad.events import Event, Reward, RolloutFinished, RolloutStarted
from tracegrad.journal import (
    Journal,
    JournalFull,
    OrphanedJournal,
    drop_torn_record,
    journal_folder,
    journal_size_limit,
    journals_size,
    orphaned_journals,
)
from tracegrad.private_files import FOLDER_MODE, open_private
from tracegrad.protocol import EVENTS_PATH, TRACES_PATH
from tracegrad.serializer import Serializer, encode
from tracegrad.signal_errors import is_of_signal_handler
from tracegrad.transport import REQUEST_TIMEOUT_S, ProxyRefused, ProxyUnreachable, Transport

_log = logging.getLogger("tracegrad")

RECORDS_PER_REQUEST = 256
BYTES_PER_REQUEST = 1 << 20  # a single record may be larger
LARGEST_RECORD = 16 << 20
LARGEST_REFUSED_FILE = 16 << 20
FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0
# So that a rollout's events share a request, and the agent its interpreter with fewer wake-ups.
LINGER_S = 0.02
MAX_WARNINGS = 20  # of single rollouts
SCAN_EVERY_S = 10.0  # for journals of processes that ended
# At exit, as long as something is acknowledged now and then; the journal keeps the rest.
EXIT_PATIENCE_S, EXIT_STALLED_S = 10.0, 2.0
# For a proxy that never answered this process: most likely there is none.
EXIT_UNSEEN_S = 1.0

_SPANS_RECORD = b'{"type":"otlp_spans"'


@dataclass(frozen=True, slots=True)
class Stats:
    """What this process's exporters did so far.

    Args:
        recorded: events and spans that were taken into a journal.
        acknowledged: those that the proxy took, also of journals that other processes left.
        truncated: events from which something was left out, because a value was too large.
        dropped: events and spans that are lost, by reason: "invalid_reward" (no number within
            bounds), "journal_full", "too_large", "unencodable", "interrupted" (by an exception of a
            signal handler), "span_failed", "torn" (half a
            record, whose writer was killed), "refused" (and not kept, for there was no room),
            "unsent" (in memory, for the disk took nothing, when the process ended).
        refused: those that the proxy will never take; they are kept in a file.
    """

    recorded: int
    acknowledged: int
    truncated: int
    dropped: Mapping[str, int]
    refused: int


def event_payload(event: Event) -> dict[str, Any]:
    """An event as `POST /api/events` takes it: its fields and `type`, as "rollout_started"."""
    kind: Any = type(event)
    name, names = _form(kind)
    payload: dict[str, Any] = {"type": name}
    for field in names:
        payload[field] = getattr(event, field)
    # Who says it, and when it was heard, are the proxy's own to say.
    if isinstance(event, Reward):
        del payload["source"]
        if event.comment is None:  # a proxy from before it would refuse the field
            del payload["comment"]
        made_at = payload.pop("created_at")
        payload["given_at"] = made_at if event.given_at is None else event.given_at
    elif isinstance(event, RolloutFinished):
        del payload["recorded_at"]
    elif isinstance(event, RolloutStarted) and not event.held_out:
        # A proxy from before it refuses the field. It refuses a rollout that has it, too: better
        # that it has no opening, and no group, than that it is trained.
        del payload["held_out"]
    return payload


@functools.cache
def _form(kind: type[Event]) -> tuple[str, tuple[str, ...]]:
    """An event's type and its fields."""
    snake_case = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    return snake_case, tuple(field.name for field in fields(kind))


class _Stopped(Exception):
    """The thread is to end."""


class EventExporter:
    """Events and spans on their way to one proxy.

    Args:
        url: the proxy's address, without a trailing slash.
        folder: where journals for it are; that of `journal.journal_folder` if None.
        limit: bytes that all journals in `folder` may hold; beyond it events are dropped.
    """

    def __init__(self, url: str, *, folder: Path | None = None, limit: int | None = None) -> None:
        self.url = url
        self.folder = folder or journal_folder(url)
        self._limit = journal_size_limit() if limit is None else limit
        self._transport = Transport(url)
        self._left: OrphanedJournal | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Also in a forked child: its parent's thread, sockets and journal are not its own."""
        self.journal = Journal(self.folder, self._limit)
        # Re-entrant, like everything on the way of `put`: a signal handler may give a reward.
        self._changed = threading.Condition(threading.RLock())
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._awake = False
        self._hurry = 0  # flushes that wait
        self._thread: threading.Thread | None = None
        self._scans = self._scans_wanted = 0
        self._scan_at = 0.0
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._dropped: Counter[str] = Counter()
        self._refused_said = False
        self._stopped = False
        self._transport.answered = False
        self.calls = CallCheck(self.url)

    def after_fork_in_child(self) -> None:
        self.journal.abandon()
        if self._left is not None:
            self._left.close()
            self._left = None
        self._start_afresh()

    def put(self, event: Event) -> None:
        """Record an event. Returns at once and never raises an `Exception`."""
        try:
            record, truncated = _encoded(event)
        except Exception as error:
            if is_of_signal_handler(error):
                self.drop("interrupted")
                raise
            self.drop("unencodable")
            _log.exception("tracegrad could not encode an event")
            return
        self._record(record, truncated)

    def put_span(self, protobuf: bytes, *, truncated: bool = False) -> None:
        """Record a span: an ExportTraceServiceRequest, serialized. Never raises."""
        record = b'%b,"protobuf":"%b"}' % (_SPANS_RECORD, base64.b64encode(protobuf))
        self._record(record, truncated)

    def drop(self, reason: str) -> int:
        """Count what is lost, and say how much so far; the first of each reason is a warning."""
        with self._changed:
            self._dropped[reason] += 1
            so_far = self._dropped[reason]
        if so_far == 1:
            _log.warning(
                "tracegrad drops events (%s); tracegrad.stats() counts them",
                reason.replace("_", " "),
            )
        return so_far

    def stats(self) -> Stats:
        with self._changed:
            return Stats(
                recorded=self._counts["recorded"],
                acknowledged=self._counts["acknowledged"],
                truncated=self._counts["truncated"],
                dropped=dict(self._dropped),
                refused=self._counts["refused"],
            )

    def flush(self, timeout: float = EXIT_PATIENCE_S, stalled: float | None = None) -> bool:
        """Wait until everything so far is delivered, also what ended processes left.

        Args:
            timeout: seconds to wait at most.
            stalled: seconds to wait at most while nothing is acknowledged; None: `timeout`.

        Returns:
            False if something is still on its way; it stays in the journal.
        """
        target = self.journal.end()
        now = time.monotonic()
        deadline, acknowledged, moved_at = now + timeout, -1, now
        with self._changed:
            self._scans_wanted += 1
            scan = self._scans_wanted
            self._start_thread()
            self._hurry += 1
            self._wake.put(None)
            try:
                while not (self.journal.is_acknowledged(target) and self._scans >= scan):
                    now = time.monotonic()
                    if self._counts["acknowledged"] != acknowledged:
                        acknowledged, moved_at = self._counts["acknowledged"], now
                    until = deadline if stalled is None else min(deadline, moved_at + stalled)
                    if now >= until or self._thread is None:
                        return False
                    self._changed.wait(until - now)
                return True
            finally:
                self._hurry -= 1

    def close(self) -> None:
        """Deliver as far as the proxy takes it now; what is left stays in the journal."""
        stalled = EXIT_STALLED_S if self._transport.answered else EXIT_UNSEEN_S
        try:
            done = self.flush(EXIT_PATIENCE_S, stalled)
        finally:  # also after an impatient Ctrl-C
            self.journal.close()
        if unsent := self.journal.in_memory():
            with self._changed:
                self._dropped["unsent"] = unsent  # not added: a process may close twice
        if not done and self.journal.folder is not None:
            _log.warning(
                "tracegrad events stay in %s: the next process that uses the proxy at %s sends "
                "them, or `python -m tracegrad.resend`",
                self.journal.folder,
                self.url,
            )
        if self._dropped:
            _log.warning("tracegrad dropped %s", _listed(self._dropped))

    def shutdown(self) -> None:
        """End the thread, as soon as its request has ended. What is put later stays in the
        journal, which another process may have now."""
        with self._changed:
            self._stopped = True
            thread = self._thread
        self._wake.put(None)
        if thread is not None:
            thread.join(REQUEST_TIMEOUT_S)
        self.journal.close()
        self.journal.abandon()

    def _record(self, record: bytes, truncated: bool) -> None:
        if len(record) > LARGEST_RECORD:
            self.drop("too_large")
            return
        try:
            self.journal.append(record)
        except JournalFull as error:
            if not self._dropped["journal_full"]:
                _log.warning("tracegrad: %s", error)
            self.drop("journal_full")
            return
        except Exception:  # of a signal handler of the agent's
            self.drop("interrupted")
            raise
        with self._changed:
            self._counts["recorded"] += 1
            self._counts["truncated"] += truncated
            if self._thread is None:
                self._start_thread()
        if not self._awake:
            self._awake = True
            self._wake.put(None)  # re-entrant, which an Event is not

    def _start_thread(self) -> None:
        with self._changed:
            if self._thread is not None or self._stopped:
                return
            _close_at_exit()
            thread = threading.Thread(target=self._run, name="tracegrad-exporter", daemon=True)
            self._thread = thread  # before it runs: a signal handler may come here too
            try:
                thread.start()
            except RuntimeError:  # no thread to be had: the journal keeps everything
                self._thread = None

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._wait()
                self._send_own()
                self._send_left()
            except _Stopped:
                return
            except Exception:  # whatever it was, the journal has the events
                _log.exception("tracegrad's exporter stumbled; it goes on")
                time.sleep(FIRST_RETRY_S)

    def _wait(self) -> None:
        if self._scans >= self._scans_wanted:
            pause = max(0.0, self._scan_at - time.monotonic())
            with suppress(queue.Empty):
                self._wake.get(timeout=pause)
        if not self._hurry:
            time.sleep(LINGER_S)
        while not self._wake.empty():
            self._wake.get_nowait()
        self._awake = False  # before the journal is read: what comes later wakes us again

    def _send_own(self) -> None:
        while (batch := self.journal.read(RECORDS_PER_REQUEST, BYTES_PER_REQUEST)) is not None:
            self._deliver(batch.records)
            # Never the journal's lock inside ours: a signal handler that interrupts `append`, which
            # holds that one, takes ours.
            self.journal.acknowledge(batch)
            with self._changed:
                self._changed.notify_all()

    def _send_left(self) -> None:
        wanted = self._scans_wanted
        if self._scans >= wanted and time.monotonic() < self._scan_at:
            return
        for left in orphaned_journals(self.folder):
            self._left = left
            try:
                for records in left.batches(RECORDS_PER_REQUEST, BYTES_PER_REQUEST):
                    complete = drop_torn_record(records)
                    for _ in range(len(records) - len(complete)):
                        self.drop("torn")
                    self._deliver(complete)
                    self._send_own()
                left.remove()
            finally:
                self._left = None
                left.close()
        self._ask_for_calls(hurry=self._scans < wanted)
        self.journal.others_bytes = journals_size(self.folder, self.journal.folder)
        self._scan_at = time.monotonic() + SCAN_EVERY_S
        with self._changed:
            self._scans = max(self._scans, wanted)
            self._changed.notify_all()

    def _ask_for_calls(self, *, hurry: bool) -> None:
        """Behind everything that was put so far: what of it makes a call is there."""
        if not (asked := self.calls.due(hurry=hurry)):
            return
        try:
            answer = self._transport.post(EVENTS_PATH, question(asked), "application/json")
        except ProxyUnreachable:
            return  # they are asked for again
        except ProxyRefused:
            answer = b""
        self.calls.decide(asked, answer)

    def _deliver(self, records: list[bytes]) -> None:
        """Returns when the proxy has taken or refused them all."""
        for path, some in _by_path(records):
            self._post(some, path)

    def _post(self, records: list[bytes], path: str) -> None:
        pause = 0.0
        while True:
            if self._stopped:
                raise _Stopped
            try:
                answer = self._transport.post(path, *_body(records, path))
                break
            except ProxyRefused as refusal:
                if len(records) > 1:  # some of them: find out which
                    middle = len(records) // 2
                    self._post(records[:middle], path)
                    self._post(records[middle:], path)
                else:
                    self._keep_refused(records[0], refusal)
                return
            except ProxyUnreachable:
                pause = min(2 * pause or FIRST_RETRY_S, LONGEST_RETRY_S)
                self._pause(pause)
        with self._changed:
            self._counts["acknowledged"] += len(records)
            self._changed.notify_all()
        if path == EVENTS_PATH:
            self._warn_of_rewards(answer)
            self.calls.answered(answer)

    def _warn_of_rewards(self, answer: bytes) -> None:
        """What the proxy says of rewards that it stored, and that are of no use."""
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # another proxy's words
            found = json.loads(answer)
            for rollout_id in found.get("unknown_rollouts", ()):
                self._warn_once(
                    f"reward for rollout {rollout_id}: the proxy knows no such rollout; look at"
                    " the id, and whether it was opened at another proxy"
                )
            for late in found.get("after_training", ()):
                step = late.get("step")
                when = f"step {step} had trained it" if step is not None else "training took it"
                self._warn_once(
                    f"reward for rollout {late['rollout_id']} came after {when}: it is kept, and"
                    " changes nothing; give rewards before the rollout ends"
                )

    def _warn_once(self, line: str) -> None:
        """Of one rollout once; of many, the first ones."""
        if line not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(line)
            _log.warning("%s", line)

    def _pause(self, seconds: float) -> None:
        """A flush cuts it short, but never below the first pause."""
        until = time.monotonic() + seconds
        time.sleep(FIRST_RETRY_S)
        while not self._hurry and not self._stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, FIRST_RETRY_S))

    def _keep_refused(self, record: bytes, refusal: ProxyRefused) -> None:
        path = self.folder / "refused.jsonl"
        try:
            path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            with open_private(path, "ab") as file:
                if file.tell() + len(record) > LARGEST_REFUSED_FILE:
                    raise OSError(f"{path} is full")
                file.write(record + b"\n")
        except OSError as error:
            self.drop("refused")
            _log.error("an event that the proxy refuses (%s) is lost: %s", refusal, error)
            return
        with self._changed:
            self._counts["refused"] += 1
        if not self._refused_said:
            self._refused_said = True
            _log.warning(
                "the tracegrad proxy at %s refuses an event: %s. Such events are kept in %s; "
                "`python -m tracegrad.resend %s` sends them again",
                self.url,
                refusal,
                path,
                path,
            )


def _encoded(event: Event) -> tuple[bytes, bool]:
    walk = Serializer()
    payload = event_payload(event)
    plain = {name: walk.serialize(value) for name, value in payload.items()}
    return encode(plain), walk.truncated


def _body(records: list[bytes], path: str) -> tuple[bytes, str]:
    """A request's body and its content type. Raises ProxyRefused for a span that another version
    of this package wrote in another way."""
    if path == EVENTS_PATH:
        return b'{"events":[%b]}' % b",".join(records), "application/json"
    # Serialized messages one after another are the message that has the fields of all.
    try:
        spans = [base64.b64decode(json.loads(record)["protobuf"]) for record in records]
    except (ValueError, LookupError, TypeError) as error:
        raise ProxyRefused(f"this version cannot read a span's record: {error!r}") from None
    return b"".join(spans), "application/x-protobuf"


def _by_path(records: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    events = [record for record in records if not record.startswith(_SPANS_RECORD)]
    spans = [record for record in records if record.startswith(_SPANS_RECORD)]
    if events:
        yield EVENTS_PATH, events
    if spans:
        yield TRACES_PATH, spans


def post_records(transport: Transport, records: list[bytes]) -> None:
    """Send records, once. Raises ProxyUnreachable and ProxyRefused."""
    for path, some in _by_path(records):
        transport.post(path, *_body(some, path))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} events ({reason})" for reason, count in sorted(counts.items()))


_exporters: dict[str, EventExporter] = {}
_exporters_lock = threading.RLock()


def exporter(url: str) -> EventExporter:
    """This process's exporter to the proxy at `url`."""
    with _exporters_lock:
        first = not _exporters
        if url not in _exporters:
            _exporters[url] = EventExporter(url)
        found = _exporters[url]
    if first:
        for line in unread_variables():
            _log.warning("%s", line)
    return found


def flush(timeout: float = EXIT_PATIENCE_S) -> bool:
    """Wait until all rollouts, rewards and spans so far have reached the proxy.

    Includes what processes that ended left in their journals, such as the workers of a pool.
    Leaving the process does the same, for at most ten seconds. Call it before reading the store.

    Args:
        timeout: seconds to wait at most.

    Returns:
        False if something is still on its way; it stays in the journal.
    """
    deadline = time.monotonic() + timeout
    delivered = True
    for each in [*_exporters.values()]:
        delivered &= each.flush(max(0.0, deadline - time.monotonic()))
    return delivered


def stats() -> Stats:
    """What was recorded, acknowledged, truncated, dropped and refused, in this process."""
    all_ = [each.stats() for each in [*_exporters.values()]]
    dropped: Counter[str] = Counter()
    for each in all_:
        dropped.update(each.dropped)
    return Stats(
        recorded=sum(each.recorded for each in all_),
        acknowledged=sum(each.acknowledged for each in all_),
        truncated=sum(each.truncated for each in all_),
        dropped=dict(dropped),
        refused=sum(each.refused for each in all_),
    )


def _close_at_exit() -> None:
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    # A process of `multiprocessing` ends without atexit (before Python 3.14).
    if multiprocessing := sys.modules.get("multiprocessing.util"):
        multiprocessing.Finalize(None, _close_all, exitpriority=10)


_recorded_at: Callable[[], str] | None = None


def send_orphaned_at_exit(url: Callable[[], str]) -> None:
    """At exit also send what child processes left for the proxy at `url()`, if this process has
    recorded nothing itself: a pool ends its workers by SIGTERM, with their last events unsent."""
    global _recorded_at
    if _recorded_at is None:
        _recorded_at = url
        _close_at_exit()


def _close_all() -> None:
    with suppress(Exception):  # a wrong setting, which a rollout would have raised
        if _recorded_at is not None:
            url = _recorded_at()
            with os.scandir(journal_folder(url)) as entries:
                left = any(entry.is_dir() for entry in entries)
            if left:
                exporter(url)
    for each in [*_exporters.values()]:
        with suppress(KeyboardInterrupt):
            each.close()


def _after_fork_in_child() -> None:
    global _exporters_lock
    _exporters_lock = threading.RLock()
    for each in _exporters.values():
        each.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
