"""All checks of a store, in one report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import func, select

from tracegrad.store.errors import StoreUnavailable
from tracegrad.store.maintenance.checks_database import (
    database_checks,
    orphan_checks,
    schema_checks,
)
from tracegrad.store.maintenance.checks_ledger import ledger_checks
from tracegrad.store.maintenance.checks_secrets import secret_checks
from tracegrad.store.maintenance.checks_steps import step_checks
from tracegrad.store.maintenance.checks_turns import shared_text_checks, turn_checks
from tracegrad.store.maintenance.findings import Finding, truncate_findings
from tracegrad.store.maintenance.repairs import repair
from tracegrad.store.maintenance.selection import EVERYTHING, RolloutSelection, pages
from tracegrad.store.models import Rollouts
from tracegrad.store.rows import chunks
from tracegrad.store.store import Store

# Rollouts whose turns are read in one transaction.
_AT_ONCE = 50

Progress = Callable[[str, int], None]  # what is being looked at, and how many turns so far


@dataclass(slots=True)
class DoctorReport:
    """`rollouts` and `turns` are those whose contents were read."""

    findings: list[Finding] = field(default_factory=list)
    rollouts: int = 0
    turns: int = 0

    @property
    def ok(self) -> bool:
        """Nothing is broken, or all that was is fixed."""
        return not any(finding.broken and not finding.fixed for finding in self.findings)


def examine(
    store: Store,
    *,
    selection: RolloutSelection = EVERYTHING,
    max_rollouts: int | None = None,
    fix: bool = False,
    progress: Progress = lambda _what, _turns: None,
) -> DoctorReport:
    """Database, tables, ledger and orphans of the whole store; contents of the turns of the
    selected rollouts, or of `max_rollouts` of these by chance. `fix`: what can be fixed is fixed
    first."""
    report = DoctorReport()
    if fix:
        report.findings += repair(store)
    for what, check in (
        ("database", lambda c: database_checks(c, store.database)),
        ("tables", schema_checks),
        ("references", orphan_checks),
        ("ledger", ledger_checks),
        ("steps", step_checks),
        ("settings", secret_checks),
        ("texts", shared_text_checks),
    ):
        progress(what, 0)
        with _readable(report, what), store.reading() as connection:
            report.findings += truncate_findings(check(connection))
    with _readable(report, "turns"):
        ids = _rollouts(store, selection, max_rollouts)
        report.findings += truncate_findings(_turns(store, ids, report, progress))
    return report


@contextmanager
def _readable(report: DoctorReport, what: str) -> Iterator[None]:
    """A database that cannot read its own pages ends one check, not all of them."""
    try:
        yield
    except StoreUnavailable as error:
        report.findings.append(
            Finding(
                check="database",
                subject=what,
                message=f"not all could be looked at: {error}",
                fix="if it is away, look again when it is back; if its files are damaged, restore "
                "the last good copy",
            )
        )


def _turns(
    store: Store, pages: Iterator[Sequence[str]], report: DoctorReport, progress: Progress
) -> Iterator[Finding]:
    for ids in pages:
        with store.reading() as connection:
            for found in turn_checks(connection, ids):
                if isinstance(found, Finding):
                    yield found
                else:
                    report.rollouts += 1
                    report.turns += found
        progress("turns", report.turns)


def _rollouts(
    store: Store, selection: RolloutSelection, most: int | None
) -> Iterator[Sequence[str]]:
    if most is not None:
        query = select(Rollouts.rollout_id).where(selection.where()).order_by(func.random())
        with store.reading() as connection:
            chosen = list(connection.scalars(query.limit(most)))
        return chunks(chosen, _AT_ONCE)
    return pages(store, selection.where(), _AT_ONCE)
