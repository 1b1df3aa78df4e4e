"""A store with versions in every state that the page shows differently."""

from __future__ import annotations

from typing import Any

from tracegrad.store import Decision, Ledger, PolicyVersion, StepRecord, Store

HOSTILE_REASON = "<script>alert(1)</script> it asks back"


def serve(store: Store, version: int, *, kept: bool = True, **detail: Any) -> None:
    """A version that a step made (0: the model folder) is served, and kept on disk or not."""
    if version:
        step = StepRecord(step=version, version=version, metrics={"drift_evidence": 0.25})
        Ledger(store).commit_step(step, trained=[], skipped={}, rollouts=[])
    made: dict[str, Any] = {"weights_step": version} | detail
    store.record_version(PolicyVersion(version, version or None, "serving", detail=made))
    state: Any = "kept" if kept else "not_kept"
    made |= {"bytes": 4_000_000} if kept else {"reason": "beyond_keep"}
    store.note_version(PolicyVersion(version, version or None, state, detail=made))


def decided(store: Store, kind: Any, version: int | None = None, **more: Any) -> int:
    """A decision that rank 0 acted on."""
    fields: dict[str, Any] = {"by": "ann@host", "reason": "tested"} | more
    outcome = fields.pop("outcome", {} if version is None else {"version": version})
    seq = store.decide(Decision(kind=kind, version=version, **fields))
    store.close_decision(seq, outcome)
    return seq


def evaluated(store: Store, version: int, verdict: str) -> None:
    result: dict[str, Any] = {"verdict": verdict, "mean_candidate": 0.75, "mean_baseline": 0.5}
    result |= {"n_candidate": 16, "n_baseline": 12}
    store.note_version(PolicyVersion(version, version, "evaluated", detail=result))


def add_versions(store: Store) -> None:
    """0 is not kept; 1 is promoted and pinned; a guard went back from 2 to it; 3 was refused by
    the gate and is served; training is paused."""
    for version in (0, 1, 2):
        serve(store, version, kept=version > 0, gate="held_out")
    evaluated(store, 1, "promote")
    decided(store, "promote", 1, by="gate:held_out", reason="better by 0.25")
    decided(store, "pin", 1)
    back = {"version": 1, "newest": 2, "served": True}
    guard: dict[str, Any] = {"by": "guard:questions", "reason": HOSTILE_REASON, "outcome": back}
    decided(store, "rollback", 1, training="continue", **guard)
    serve(store, 3, gate="held_out")
    evaluated(store, 3, "reject")
    decided(store, "promote", 2, outcome={"refused": "version 2 was rolled back"})
    decided(store, "pause", reason="<b>looking</b>")
