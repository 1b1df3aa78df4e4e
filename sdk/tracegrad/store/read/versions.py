"""How each policy version stands: a fold over what became of it and what was decided.

`version_events` says what happened to a version, `decisions` what somebody wanted; nothing here
writes. A number names weights for good, but weights may have several numbers: a run that resumes
may serve them again under a new one (`VersionRecord.weights_step` tells).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import Connection, func, select

from tracegrad.events import Json
from tracegrad.store.models import Decisions, Steps, VersionEvents
from tracegrad.store.rows import load, rows_of_keys, select_fields
from tracegrad.store.types import Decision, PolicyVersion

_LOOKED_AT = 20  # rollbacks do not say of which model they are

VersionState = Literal[
    "pushing", "candidate", "promoted", "served", "rolled_back", "lost", "superseded", "failed"
]


_SERVED_WELL: tuple[VersionState, ...] = ("served", "candidate", "promoted")


@dataclass(slots=True, kw_only=True)
class VersionRecord:
    """`state`: served, by itself; candidate, while its evaluation lasts; promoted: the last one
    that somebody, or the gate, found good; rolled_back: it came after a version that was returned
    to; lost: its step was never committed; superseded: it was trained, and never served, because of
    a rollback; failed: its push did.

    `weights_step`: the optimizer step that made its weights, 0: the model folder has them, below 0:
    nobody has them any more. `kept`: its weights are on the trainer's disk, or `not_kept` is the
    reason why not. `decision` is the last one that names it.
    """

    version: int
    step: int | None
    weights_step: int
    created_at: float
    state: VersionState = "pushing"
    serving: bool = False
    kept: bool = False
    kept_bytes: int | None = None
    not_kept: str | None = None
    pinned: bool = False
    evaluation: Json | None = None
    decision: Decision | None = None


@dataclass(slots=True, kw_only=True)
class VersionHistory:
    """All versions, the oldest first, and what holds of them together."""

    records: dict[int, VersionRecord] = field(default_factory=dict)
    serving: int | None = None
    promoted: int | None = None
    promoted_at: float = 0.0  # when it was acted on
    paused: Decision | None = None  # training is, by this one
    # The last rollback that was acted on: training goes on from its version until a step of that is
    # committed.
    rollback: Decision | None = None
    refused: list[Decision] = field(default_factory=list)  # that nothing was done about

    def same_weights(self, first: int, second: int) -> bool:
        return self.records[first].weights_step == self.records[second].weights_step

    def numbers_of(self, version: int) -> list[int]:
        """All numbers that the version's weights were given, `version` too."""
        step = self.records[version].weights_step
        return [one.version for one in self.records.values() if one.weights_step == step]

    def kept(self) -> list[int]:
        return [one.version for one in self.records.values() if one.kept]

    def kept_before(self, version: int) -> int | None:
        """The newest that was served well and is kept, `version` or one before it; else the
        promoted one, if it is kept. None: neither is."""
        found = [
            one.version
            for one in self.records.values()
            if one.kept and one.state in _SERVED_WELL and one.version <= version
        ]
        if found:
            return max(found)
        promoted = self.promoted
        return promoted if promoted is not None and self.records[promoted].kept else None

    def rollback_base(self, last_step: int) -> VersionRecord | None:
        """The version that was returned to after `last_step`, the last committed one: training goes
        on from it until a step is committed. None: it goes on from the last committed step."""
        rollback = self.rollback
        if (
            rollback is None
            or rollback.outcome is None
            or rollback.outcome["last_step"] < last_step
        ):
            return None
        return self.records[rollback.outcome["version"]]

    def rollback_target(self) -> int:
        """What a rollback without a version goes to: the promoted one, unless it is served; else
        the last one before what is served that was served well. ValueError: there is none."""
        if self.serving is None:
            raise ValueError("version: nothing is served yet, so there is nothing to go back from")
        good = [self.promoted] if self.promoted is not None else []
        good += [
            one.version
            for one in reversed(self.records.values())
            if one.state in _SERVED_WELL and one.version < self.serving
        ]
        for version in good:
            if self.records[version].kept and not self.same_weights(version, self.serving):
                return version
        raise ValueError(
            f"version: no good version before {self.serving} is kept on disk, and none was promoted"
            " (promotion.keep; trainer promote V)"
        )

    def check_target(self, version: int) -> VersionRecord:
        """One that can be promoted, pinned, or returned to. ValueError: why it cannot."""
        record = self.records.get(version)
        if record is None:
            newest = max(self.records, default=None)
            known = "there is none yet" if newest is None else f"the newest is {newest}"
            raise ValueError(f"version: there is no version {version}; {known}")
        if record.state in ("failed", "superseded", "pushing"):
            raise ValueError(f"version: {version} was never served ({record.state})")
        if not record.kept:
            why = f" ({record.not_kept})" if record.not_kept else ""
            kept = ", ".join(map(str, self.kept())) or "none"
            raise ValueError(f"version: {version} is not kept on disk{why}; kept are: {kept}")
        return record

    def check_possible(self, decision: Decision, waiting: Sequence[Decision] = ()) -> None:
        """Raises ValueError where what is stored says already that it cannot be. `waiting`:
        decisions that the next trainer acts on first."""
        match decision.kind:
            case "rollback" if decision.version is None:
                self.rollback_target()
            case "promote" | "pin" | "rollback":
                assert decision.version is not None
                self.check_target(decision.version)
            case "unpin":
                assert decision.version is not None
                record = self.records.get(decision.version)
                if record is None:
                    self.check_target(decision.version)
                elif not record.pinned:
                    raise ValueError(f"version: {decision.version} is not pinned")
            case "pause" if self.paused is not None:
                by = self.paused
                raise ValueError(f"training is paused already, by {by.by}: {by.reason}")
            case "resume" if self.paused is None and not any(one.pauses for one in waiting):
                raise ValueError("training is not paused")
            case _:
                pass


def version_history(
    connection: Connection, versions: Collection[int] | None = None
) -> VersionHistory:
    """Of all versions; a version has a handful of events, and ten thousand versions take a second.

    `versions`: of these, and of all that are kept on disk, served, the newest, pinned, promoted, or
    were returned to. So all is as it is in the whole history, but `records`, `numbers_of` and the
    checks of what can be decided about a version, which know these alone.
    """
    history = VersionHistory()
    acted = select_fields(Decision, Decisions).where(Decisions.acted_at.is_not(None))
    decisions = load(connection, Decision, acted.order_by(Decisions.seq))
    query = select_fields(PolicyVersion, VersionEvents).order_by(VersionEvents.seq)
    if versions is None:
        events = load(connection, PolicyVersion, query)
    else:
        named = {*versions, *_standing_versions(connection), *_named_versions(decisions)}
        rows = rows_of_keys(connection, query, VersionEvents.version, sorted(named))
        events = [PolicyVersion(**row._mapping) for row in rows]
    for event in events:
        _apply_event(history, event)
    if versions is not None:
        history.serving = serving_version(connection)  # events of few versions are in no order
    for decision in decisions:
        if decision.refused is None:
            _apply_decision(history, decision)
        else:
            history.refused.append(decision)
    _find_lost(connection, history)
    _name_states(history)
    history.records = dict(sorted(history.records.items()))
    return history


def version_numbers(connection: Connection, limit: int, *, before: int | None = None) -> list[int]:
    """The last `limit` versions, the newest first; `before`: of those before this one."""
    query = select(VersionEvents.version).distinct().order_by(VersionEvents.version.desc())
    if before is not None:
        query = query.where(VersionEvents.version < before)
    return list(connection.scalars(query.limit(limit)))


def _standing_versions(connection: Connection) -> set[int]:
    """The newest version, the one that is served, and all that are kept on disk."""
    last = select(func.max(VersionEvents.seq)).where(VersionEvents.state.in_(("kept", "not_kept")))
    kept = select(VersionEvents.version).where(
        VersionEvents.seq.in_(last.group_by(VersionEvents.version)), VersionEvents.state == "kept"
    )
    found = {*connection.scalars(kept), *version_numbers(connection, 1)}
    serving = serving_version(connection)
    return found if serving is None else found | {serving}


def _named_versions(decisions: Sequence[Decision]) -> set[int]:
    """Those that decisions about others depend on: what is pinned, was returned to, or was the
    promoted one then or is now. A gate promotes nearly every version."""
    named: set[int | None] = set()
    promoted: int | None = None
    for one in decisions:
        version = (one.outcome or {}).get("version", one.version)
        if one.refused is not None:
            continue
        if one.kind == "promote":
            promoted = version
        elif one.kind == "rollback":
            named |= {promoted, version}
        else:
            named.add(version)
    named.add(promoted)
    return {version for version in named if version is not None}


def serving_version(connection: Connection) -> int | None:
    """What is served: the last that began to be; None before the first."""
    query = (
        select(VersionEvents.version)
        .where(VersionEvents.state == "serving")
        .order_by(VersionEvents.seq.desc())
        .limit(1)
    )
    return connection.scalar(query)


def outcomes_of_versions(
    connection: Connection, versions: Collection[int], state: str
) -> dict[int, PolicyVersion]:
    """By version, the last time that it came to be so (`serving`: its push, `evaluated`: its
    rewards); versions that never did are left out."""
    query = (
        select_fields(PolicyVersion, VersionEvents)
        .where(VersionEvents.state == state)
        .order_by(VersionEvents.seq)
    )
    rows = rows_of_keys(connection, query, VersionEvents.version, versions)
    return {row.version: PolicyVersion(**row._mapping) for row in rows}


def pushes_of_versions(
    connection: Connection, versions: Collection[int]
) -> dict[int, PolicyVersion]:
    """By version how its push came out, serving or failed: the first time, since a rollback serves
    it again. Those that were not pushed are left out."""
    query = (
        select_fields(PolicyVersion, VersionEvents)
        .where(VersionEvents.state.in_(("serving", "failed")))
        .order_by(VersionEvents.seq.desc())
    )
    rows = rows_of_keys(connection, query, VersionEvents.version, versions)
    return {row.version: PolicyVersion(**row._mapping) for row in rows}


def served_model(connection: Connection) -> Json | None:
    """What the version that was served last said of the model folder (`detail["base"]`); None:
    none said."""
    query = (
        select(VersionEvents.detail)
        .where(VersionEvents.state == "serving")
        .order_by(VersionEvents.seq.desc())
        .limit(_LOOKED_AT)
    )
    bases = (detail.get("base") for detail in connection.scalars(query))
    return next((base for base in bases if base is not None), None)


def training_pause(connection: Connection) -> Decision | None:
    """The decision that training is paused by; None: it is not."""
    query = (
        select_fields(Decision, Decisions)
        .where(Decisions.kind.in_(("pause", "resume", "rollback")), Decisions.acted_at.is_not(None))
        .order_by(Decisions.seq.desc())
    )
    for one in load(connection, Decision, query):
        if one.refused is None:
            return one if "pause" in (one.kind, one.training) else None
    return None


def rolled_back_versions(connection: Connection) -> list[tuple[int, int]]:
    """The versions that rollbacks gave up, as (first, last), the newest ones first: what the
    weights of now do not come from."""
    query = (
        select(Decisions.outcome)
        .where(Decisions.kind == "rollback", Decisions.acted_at.is_not(None))
        .order_by(Decisions.seq)
    )
    outcomes = [one for one in connection.scalars(query) if "newest" in one]  # else refused
    return given_up_versions([(one["version"], one["newest"]) for one in outcomes])


def given_up_versions(rollbacks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """As `rolled_back_versions`, of rollbacks in order: the version that each returned to, and the
    newest there was. Training goes on behind the newest, so that each begins a branch."""
    begins = [0, *(newest + 1 for _, newest in rollbacks)]
    found = []
    branch = len(rollbacks)
    while branch:
        version = rollbacks[branch - 1][0]
        if version + 1 < begins[branch]:
            found.append((version + 1, begins[branch] - 1))
        branch = bisect_right(begins, version) - 1
    return found


def kept_steps(connection: Connection) -> set[int]:
    """The steps whose weights are kept on disk as those of versions: their checkpoints stay too."""
    query = (
        select(VersionEvents.version, VersionEvents.state, VersionEvents.detail)
        .where(VersionEvents.state.in_(("kept", "not_kept")))
        .order_by(VersionEvents.seq)
    )
    steps: dict[int, int] = {}
    for version, state, detail in connection.execute(query):
        if state == "kept":
            steps[version] = detail["weights_step"]
        else:
            steps.pop(version, None)
    return set(steps.values())


def _apply_event(history: VersionHistory, event: PolicyVersion) -> None:
    record = history.records.setdefault(
        event.version,
        VersionRecord(
            version=event.version,
            step=event.step,
            weights_step=event.step or 0,
            created_at=event.created_at,
        ),
    )
    record.weights_step = event.detail.get("weights_step", record.weights_step)
    match event.state:
        case "pushing" | "failed" | "superseded":
            record.state = event.state
        case "serving":
            record.state = "candidate" if event.detail.get("gate", "none") != "none" else "served"
            history.serving = event.version
        case "kept":
            record.kept, record.kept_bytes = True, event.detail.get("bytes")
            record.not_kept = None
        case "not_kept":
            record.kept, record.kept_bytes = False, None
            record.not_kept = event.detail.get("reason")
        case "evaluated":
            record.evaluation = event.detail


def _apply_decision(history: VersionHistory, decision: Decision) -> None:
    outcome = decision.outcome or {}
    version = outcome.get("version", decision.version)
    record = history.records.get(version) if version is not None else None
    if record is not None:
        record.decision = decision
    match decision.kind:
        case "promote" if record is not None:
            history.promoted, history.promoted_at = version, decision.acted_at or 0.0
        case "pin" | "unpin" if record is not None:
            record.pinned = decision.kind == "pin"
        case "rollback" if record is not None:
            history.rollback = decision
            for one in history.records.values():
                beyond = record.version < one.version <= outcome.get("newest", record.version)
                lost = beyond and one.weights_step != record.weights_step
                if lost and one.state in ("served", "candidate"):
                    one.state = "rolled_back"
            if record.state == "rolled_back":
                record.state = "served"
            if history.promoted is not None and not history.same_weights(
                history.promoted, record.version
            ):
                history.promoted = record.version
                history.promoted_at = decision.acted_at or 0.0
    if decision.kind == "pause" or decision.training == "pause":
        history.paused = decision
    elif decision.kind == "resume" or decision.training == "continue":
        history.paused = None


def _find_lost(connection: Connection, history: VersionHistory) -> None:
    """Versions of a step whose number another one has by now: nobody else has their weights."""
    steps = {record.weights_step for record in history.records.values()}
    rows = rows_of_keys(connection, select(Steps.step, Steps.version), Steps.step, steps)
    made = {row.step: row.version for row in rows}
    for record in history.records.values():
        if made.get(record.weights_step, 0) > record.version:
            record.weights_step = -1 - record.version
            if record.state in ("served", "candidate"):
                record.state = "lost"


def _name_states(history: VersionHistory) -> None:
    """Of those whose state others decide: the promoted one, and candidates that are none."""
    for record in history.records.values():
        record.serving = record.version == history.serving
        if record.state not in ("served", "candidate"):
            continue
        promoted = history.promoted is not None and history.same_weights(
            record.version, history.promoted
        )
        if promoted:
            record.state = "promoted"
        elif record.evaluation is not None or not record.serving:
            record.state = "served"
