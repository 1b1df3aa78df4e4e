"""What the doctor finds in a store, for tests that break one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from support.store.conversations import conversation
from support.store.corruption import corrupt
from support.store.events import make_turn, rollout_events
from tracegrad.events import Outcome, RolloutStarted
from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad.store.maintenance import DoctorReport, Finding, examine

Breaks = Callable[..., None]


@pytest.fixture
def breaks(url: str) -> Breaks:
    """Runs a statement that no program of ours would."""
    return lambda statement, *values: corrupt(url, statement, *values)


def found(store: Store, check: str, **more: Any) -> list[Finding]:
    """Of this check, and nothing else is found."""
    report = look(store, **more)
    assert {finding.check for finding in report.findings} <= {check}, report.findings
    assert report.ok is not any(f.broken and not f.fixed for f in report.findings)
    return report.findings


def look(store: Store, **more: Any) -> DoctorReport:
    """Without the warnings for the settings that make the tests' PostgreSQL fast."""
    report = examine(store, **more)
    report.findings = [f for f in report.findings if f.check != "database" or f.broken]
    return report


def healthy(store: Store) -> None:
    now = time.time()
    for number in range(3):
        store.append(rollout_events(f"r{number}", at=now - 100, turns=3, version=number))
        version = PolicyVersion(version=number + 1, step=number, state="serving")
        store.record_version(PolicyVersion(version=number + 1, step=number, state="pushing"))
        store.record_version(version)
    ledger = Ledger(store)
    for number in range(2):
        turns = [turn.turn_id for turn in store.rollout_turns(f"r{number}")]
        ledger.commit_step(
            StepRecord(step=number, version=number + 1),
            trained=turns[1:],
            skipped={turns[0]: "zero_advantage"},
            rollouts=[f"r{number}"],
        )
    ledger.lease(groups=1, group_size=1, owner="trainer", ttl_s=60)
    store.append(
        [*conversation("deltas", at=now), RolloutStarted(rollout_id="deltas", opened_at=now)]
    )
    store.append([make_turn("t", "untitled", sampled=(), untrainable="over_length")])
    store.append(rollout_events("broken", outcome=Outcome.INFRA_ERROR, at=now))
    store.add_key("not-yet", b"k" * 32)
