"""The log that workers share: nothing is lost unsaid, whatever the ring holds and whoever dies."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from tracegrad.proxy.shared_log import SharedLog


def in_a_fork(work: Callable[[], None]) -> int:
    """Its exit status; `work` may kill it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def listener(log: SharedLog) -> list[Any]:
    heard: list[Any] = []
    log.subscribe("word", lambda *args: heard.append(args))
    log.when_lost(lambda: heard.append("lost"))
    return heard


def test_records_of_all_sizes_come_in_order_round_and_round_the_ring() -> None:
    draw = random.Random(4)
    log = SharedLog(2, ring_bytes=4096)
    heard = listener(log)
    words = [(number, bytes(draw.randrange(700))) for number in range(120)]
    log.join(0)
    for start in range(0, len(words), 3):
        part = words[start : start + 3]

        def write(part: list[tuple[int, bytes]] = part) -> None:
            log._own = None
            log.join(1)
            said = [log.publish("word", *word) for word in part]
            assert said == [True] * len(part)

        assert in_a_fork(write) == 0
        log.catch_up()
    assert heard == words


def test_a_reader_that_is_overtaken_is_told_and_reads_on() -> None:
    log = SharedLog(2, ring_bytes=1024)
    heard = listener(log)
    log.join(0)

    def write(numbers: range) -> None:
        log._own = None
        log.join(1)
        for number in numbers:
            log.publish("word", number, bytes(100))

    in_a_fork(lambda: write(range(50)))
    log.catch_up()
    assert heard == ["lost"]
    in_a_fork(lambda: write(range(50, 52)))
    log.catch_up()
    assert [word[0] for word in heard[1:]] == [50, 51]


def test_what_is_too_large_is_refused() -> None:
    log = SharedLog(2, ring_bytes=1024)
    log.join(0)
    assert not log.publish("word", bytes(1000))
    assert log.publish("word", bytes(100))


def test_a_worker_that_is_started_again_hears_its_predecessor_once() -> None:
    log = SharedLog(2)

    def first() -> None:
        log.join(0)
        log.publish("word", "said")
        os.kill(os.getpid(), 9)

    assert in_a_fork(first) == -9
    heard = listener(log)
    log.catch_up()
    assert heard == [], "before it joins its caches may not be there"
    log.join(0)
    log.catch_up()
    assert heard == [("said",)]
