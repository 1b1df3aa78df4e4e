"""What is decided about tasks and images: by people, and by the rule (`read.task_health`)."""

from __future__ import annotations

import time
from collections.abc import Collection

from sqlalchemy import Connection, insert

from tracegrad.store.models import TaskDecisions
from tracegrad.store.read.task_health import (
    DEFAULT_RULE,
    QuarantineRule,
    Subject,
    SubjectHealth,
    TaskDecision,
    is_known,
    last_decisions,
    subject_health,
)
from tracegrad.store.retry import retry_on_conflict
from tracegrad.store.rows import column_values
from tracegrad.store.store import Store


def decide(store: Store, decision: TaskDecision) -> None:
    """A person's. Raises ValueError: it is of something that no rollout knows, or says nothing."""
    if not decision.by or not decision.reason.strip():
        name = "reason" if decision.by else "by"
        raise ValueError(f"{name}: is empty; every decision says who made it, and why")
    with store.exclusive() as connection:
        subject = Subject(decision.subject, decision.subject_id)
        last = last_decisions(connection, [subject]).get(subject)
        if last is None and not is_known(connection, subject):
            raise ValueError(
                f"no rollout is of {subject}; `tracegrad tasks ls` has those there are"
            )
        is_aside = last is not None and last.kind == "quarantine"
        if is_aside == (decision.kind == "quarantine"):
            is_so = (
                "is quarantined already" if decision.kind == "quarantine" else "is not quarantined"
            )
            raise ValueError(f"{subject} {is_so}")
        _write(connection, decision)


def apply_rule(
    store: Store, subjects: Collection[Subject], rule: QuarantineRule = DEFAULT_RULE
) -> list[SubjectHealth]:
    """How each stands, in their order, once what the rule finds is decided: those that fail or
    whose reward never varies are set aside, and released where attempts since say otherwise."""
    with store.reading() as connection:
        found = subject_health(connection, subjects, rule)
    # No others are looked at in the transaction, which holds up whoever writes to the store.
    to_decide = dict.fromkeys(health.subject for health in found if health.finding)
    if not to_decide:
        return found
    retry_on_conflict(lambda: _decide_by_rule(store, to_decide, rule))
    with store.reading() as connection:
        return subject_health(connection, subjects, rule)


def _decide_by_rule(store: Store, subjects: Collection[Subject], rule: QuarantineRule) -> None:
    with store.exclusive() as connection:
        # Once more: another asker may have decided the same meanwhile.
        now = time.time()
        for health in subject_health(connection, subjects, rule):
            if (finding := health.finding) is not None:
                decision = TaskDecision(
                    subject=health.subject.kind,
                    subject_id=health.subject.id,
                    kind=finding.kind,
                    by=finding.by,
                    reason=finding.reason,
                    evidence=finding.evidence,
                    created_at=now,
                )
                _write(connection, decision)


def _write(connection: Connection, decision: TaskDecision) -> None:
    connection.execute(insert(TaskDecisions).values(column_values(decision, TaskDecisions)))
