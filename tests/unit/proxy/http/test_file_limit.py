"""A connection is a file, and so is the one to the engine: the system must give as many."""

from __future__ import annotations

import resource

import pytest

from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.limits import OTHER_FILES, ConnectionLimits, raise_file_limit


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "set_to", "connections"),
    [
        (1024, 1_000_000, 1000, 2000 + OTHER_FILES, 1000),
        (1024, resource.RLIM_INFINITY, 1000, 2000 + OTHER_FILES, 1000),
        (1024, 1224, 1000, 1224, (1224 - OTHER_FILES) // 2),
        (9000, 9000, 1000, None, 1000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, None, 1000),
        (100, 100, 1000, 100, 1),
    ],
)
def test_the_limit_is_raised_as_far_as_needed_and_possible(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    wanted: int,
    set_to: int | None,
    connections: int,
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    assert raise_file_limit(wanted) == connections
    assert given == ([] if set_to is None else [(set_to, hard)])


def test_limits_come_from_the_settings() -> None:
    settings = ProxySettings(
        max_connections=7,
        max_head_kib=2,
        max_headers=9,
        head_timeout_s=1,
        body_timeout_s=2,
        min_body_kib_s=1.5,
        send_timeout_s=3,
        idle_timeout_s=4,
    )
    assert ConnectionLimits.of(settings) == ConnectionLimits(
        head_bytes=2048,
        head_fields=9,
        head_s=1,
        body_s=2,
        body_rate=1536,
        send_idle_s=3,
        connections=7,
        idle_s=4,
    )
    assert ConnectionLimits.of(ProxySettings()) == ConnectionLimits(), (
        "the same defaults in both places"
    )
