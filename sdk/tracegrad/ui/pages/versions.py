"""Policy versions: how each stands, what the gate found, what was decided; and deciding about them.

A decision is written into the store, and rank 0 acts on it, as on the command line's: the page
shows it as open until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from tracegrad.inspect.decision_text import describe_decision, evaluation_text
from tracegrad.inspect.metric_points import finite_number
from tracegrad.store import Decision, StepHistory, Store
from tracegrad.store.models import Decisions
from tracegrad.store.read.versions import (
    VersionHistory,
    VersionRecord,
    version_history,
    version_numbers,
)
from tracegrad.store.rows import count_rows
from tracegrad.store.types import DecisionKind
from tracegrad.store.write.decisions import decide as write_decision
from tracegrad.store.write.decisions import newest_decisions, open_decisions
from tracegrad.ui.paging import PAGE, link, read_number
from tracegrad.ui.security import BASE

PATH = f"{BASE}/versions"
MOST_DECISIONS = 50
MOST_REASON = 2_000  # characters
# What a form about one version may decide, in the order of its buttons.
_OF_A_VERSION: tuple[DecisionKind, ...] = ("promote", "rollback", "pin", "unpin")
_STATE_CLASS = {
    "promoted": "good",
    "served": "plain",
    "candidate": "live",
    "pushing": "live",
    "rolled_back": "warn",
    "failed": "bad",
    "lost": "bad",
}
_VERDICT_CLASS = {"promote": "good", "reject": "bad"}


@dataclass(frozen=True, slots=True)
class ListedVersion:
    """A row of the table. `possible`: what can be decided about it now."""

    record: VersionRecord
    possible: tuple[DecisionKind, ...]

    @property
    def state_class(self) -> str:
        return _STATE_CLASS.get(self.record.state, "plain")

    @property
    def megabytes(self) -> float | None:
        """On disk."""
        found = finite_number(self.record.kept_bytes)
        return None if found is None else found / 1e6

    @property
    def evaluation(self) -> str:
        return evaluation_text(self.record.evaluation)

    @property
    def verdict_class(self) -> str:
        return _VERDICT_CLASS.get(str((self.record.evaluation or {}).get("verdict")), "plain")

    @property
    def why_not(self) -> str:
        """Where nothing is possible."""
        if not self.record.kept:
            return f"its weights are not on disk ({self.record.not_kept or 'they never were'})"
        return f"it was never served ({self.record.state})"

    @property
    def made_by(self) -> int | None:
        """The step whose weights it has; None: the model folder, or nobody knows."""
        return self.record.weights_step if self.record.weights_step > 0 else None


@dataclass(frozen=True, slots=True)
class ListedDecision:
    decision: Decision

    @property
    def what(self) -> str:
        one = self.decision
        return one.kind if one.version is None else f"{one.kind} {one.version}"

    @property
    def came(self) -> str:
        """What came of it."""
        if self.decision.refused is not None:
            return f"refused: {self.decision.refused}"
        return describe_decision(self.decision)

    @property
    def state_class(self) -> str:
        if self.decision.refused is not None:
            return "bad"
        return "good" if self.decision.acted_at is not None else "live"

    @property
    def state(self) -> str:
        return {"bad": "refused", "good": "done", "live": "open"}[self.state_class]


def versions_values(
    store: Store,
    before: int | None,
    chosen: int | None,
    problem: str | None = None,
    given: Mapping[str, str] = {},
) -> dict[str, Any]:
    """What the template needs: the versions below `before`, the newest first, and a form for the
    `chosen` one. `problem`: why what was `given` with a form was not done."""
    with store.reading() as connection:
        found = version_numbers(connection, PAGE + 1, before=before)
        asked = [*found[:PAGE], *([] if chosen is None else [chosen])]
        history = version_history(connection, asked)
        decisions = newest_decisions(connection, MOST_DECISIONS)
        waiting = open_decisions(connection)
        decided = count_rows(connection, Decisions)
    rows = [
        ListedVersion(history.records[version], _possible(history, version, waiting))
        for version in found[:PAGE]
    ]
    last = StepHistory(store).steps(1)
    return {
        "history": history,
        "rows": rows,
        "chosen": _chosen(history, chosen, waiting),
        "first_page": before is None,
        "older": link(PATH, [], before=str(rows[-1].record.version)) if found[PAGE:] else None,
        "kept_elsewhere": _kept_elsewhere(history, rows),
        "decisions": [ListedDecision(one) for one in decisions],
        "more_decisions": decided - len(decisions),
        "may_resume": history.paused is not None or any(one.pauses for one in waiting),
        "may_pause": history.paused is None and not any(one.kind == "pause" for one in waiting),
        "most_reason": MOST_REASON,
        "guards": _guards(last[0].metrics if last else {}),
        "problem": problem,
        "given": given,
    }


def _chosen(
    history: VersionHistory, version: int | None, waiting: Sequence[Decision]
) -> ListedVersion | None:
    record = history.records.get(version) if version is not None else None
    if record is None:
        return None
    return ListedVersion(record, _possible(history, record.version, waiting))


def _possible(
    history: VersionHistory, version: int, waiting: Sequence[Decision]
) -> tuple[DecisionKind, ...]:
    found = []
    for kind in _OF_A_VERSION:
        try:
            history.check_possible(_decision(kind, version), waiting)
        except ValueError:
            continue
        record = history.records[version]
        idle = {"promote": record.state == "promoted", "pin": record.pinned}
        idle["rollback"] = record.serving
        if not idle.get(kind, False):
            found.append(kind)
    return tuple(found)


def _decision(kind: DecisionKind, version: int) -> Decision:
    training: Any = "continue" if kind == "rollback" else None
    return Decision(kind=kind, version=version, training=training, by="-", reason="-")


def _kept_elsewhere(history: VersionHistory, rows: Sequence[ListedVersion]) -> list[int]:
    """Those whose weights are on disk, on other pages of the list."""
    shown = {row.record.version for row in rows}
    return [version for version in history.kept() if version not in shown]


def _guards(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Of the last step; {} where no guard looks."""
    found = {name: finite_number(metrics.get(name)) for name in ("drift_evidence", "drift_alarms")}
    return {name: value for name, value in found.items() if value is not None}


def read_decision(fields: Mapping[str, str], by: str) -> Decision:
    """What a form asks for. ValueError names the field."""
    kind = fields.get("kind", "")
    if kind not in get_args(DecisionKind):
        raise ValueError(f"kind: {kind[:40]!r} is none of {', '.join(get_args(DecisionKind))}")
    text = fields.get("version", "").strip()
    if text and not (text.isdecimal() and text.isascii() and len(text) <= 9):
        raise ValueError(f"version: {text[:40]!r} is no version")
    reason = fields.get("reason", "").strip()
    if not reason:
        raise ValueError("reason: say why; whoever looks at this later wants to know")
    if len(reason) > MOST_REASON:
        raise ValueError(f"reason: {len(reason):,} characters; {MOST_REASON:,} at most")
    training: Any = fields.get("training", "continue") if kind == "rollback" else None
    return Decision(
        kind=cast("DecisionKind", kind),
        version=int(text) if text else None,
        training=training,
        by=by,
        reason=reason,
    )


def decide(store: Store, fields: Mapping[str, str], by: str) -> int:
    """Write it down; its number. ValueError: it cannot be, with the field or the reason."""
    decision = read_decision(fields, by)
    with store.exclusive() as connection:
        waiting = open_decisions(connection)
        version_history(connection).check_possible(decision, waiting)
        for one in waiting:
            # A second press of the button is no second decision.
            if (one.kind, one.version) == (decision.kind, decision.version):
                raise ValueError(
                    f"{one.kind} is asked for already, by {one.by}: decision {one.seq} is open"
                    " until a trainer acts on it"
                )
        return write_decision(connection, decision)


def read_version(name: str, text: str | None) -> int | None:
    """Of a link's parameter. WrongLink: it is none."""
    return None if text is None else read_number(name, text)
