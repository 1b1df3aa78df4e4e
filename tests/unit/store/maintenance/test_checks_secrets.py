"""Passwords in the settings of steps: found by the doctor, taken out on request."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import make_url

from tracegrad.store import Ledger, StepRecord, Store
from tracegrad.store.maintenance import examine

WORD = "pa:ss@word-1"
# So long that the page that it is on is given free, and keeps what it held unless that is wiped.
PASSWORD = WORD * 1000
SETTINGS = {
    "proxy": {"store": f"postgresql://me:{PASSWORD}@db.internal/traces", "port": 4141},
    "others": ["sqlite:////a/store.db", f"postgresql:///x?host=h&password={PASSWORD}"],
    "lr": 1e-6,
}


def test_a_password_in_a_steps_settings_is_found_and_taken_out(store: Store, url: str) -> None:
    for number, settings in enumerate(({"lr": 1.0}, SETTINGS, {}), start=1):
        record = StepRecord(step=number, version=number, settings=settings)
        Ledger(store).commit_step(record, trained=[], skipped={}, rollouts=[])
    report = examine(store)
    [finding] = [each for each in report.findings if each.check == "secrets"]
    assert (finding.subject, finding.broken) == ("step 2", True)
    assert "doctor --fix" in finding.fix
    assert WORD not in repr(report)

    fixed = examine(store, fix=True)
    [repaired] = [each for each in fixed.findings if each.check == "secrets"]
    assert (repaired.fixed, repaired.count) == (True, 1)
    assert [step.settings for step in Ledger(store).steps()] == [
        {"lr": 1.0},
        {
            "proxy": {"store": "postgresql://me:***@db.internal/traces", "port": 4141},
            "others": ["sqlite:////a/store.db", "postgresql:///x?host=h&password=***"],
            "lr": 1e-6,
        },
        {},
    ]
    assert not [each for each in examine(store).findings if each.check == "secrets"]
    if make_url(url).drivername == "sqlite":
        store.close()  # the log goes into the file
        left = b"".join(p.read_bytes() for p in Path(str(make_url(url).database)).parent.iterdir())
        assert WORD.encode() not in left
