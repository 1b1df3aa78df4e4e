"""`trainer versions`, and what decides about them: promote, rollback, pin, unpin, pause, resume.

A command writes its decision into the store and waits for rank 0 to act on it: it works from any
machine that reaches the store. What the store shows to be impossible is refused at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console

from tracegrad.events import Json
from tracegrad.store import Decision, Store
from tracegrad.store.read.versions import VersionHistory, VersionRecord
from tracegrad.text_format import format_age
from tracegrad_trainer.utils.console import plain_table, print_json, print_report

POLL_S = 0.05


class DecisionRefused(RuntimeError):
    """Rank 0 refused it; its own line."""


def check_possible(
    history: VersionHistory, decision: Decision, waiting: Sequence[Decision] = ()
) -> None:
    """Raises ValueError where what is stored says already that it cannot be. `waiting`: decisions
    that the next trainer acts on first."""
    match decision.kind:
        case "rollback" if decision.version is None:
            history.rollback_target()
        case "promote" | "pin" | "rollback":
            assert decision.version is not None
            history.check_target(decision.version)
        case "unpin":
            assert decision.version is not None
            record = history.records.get(decision.version)
            if record is None:
                history.check_target(decision.version)
            elif not record.pinned:
                raise ValueError(f"version: {decision.version} is not pinned")
        case "pause" if history.paused is not None:
            raise ValueError(f"training is paused already, by {_by(history.paused)}")
        case "resume" if history.paused is None and not any(map(_pauses, waiting)):
            raise ValueError("training is not paused")
        case _:
            pass


def decide(
    store: Store, decision: Decision, *, wait_s: float, sleep: Callable[[float], None] = time.sleep
) -> Decision:
    """As it stands after at most `wait_s` seconds: with `acted_at`, or nobody has acted on it yet.

    Raises:
        ValueError: it cannot be.
        DecisionRefused: rank 0 says so.
    """
    check_possible(store.version_history(), decision, store.open_decisions())
    seq = store.decide(decision)
    deadline = time.monotonic() + wait_s
    while True:
        [found] = store.decisions(after=seq - 1)[:1]
        if found.refused is not None:
            raise DecisionRefused(found.refused)
        if found.acted_at is not None or time.monotonic() >= deadline:
            return found
        sleep(POLL_S)


def _pauses(decision: Decision) -> bool:
    return "pause" in (decision.kind, decision.training)


def describe(decision: Decision) -> str:
    """One line: what was done, or that nobody has done it yet."""
    if decision.acted_at is None:
        return (
            f"{decision.kind} is recorded, and no trainer has acted on it yet: the one that runs on"
            " this store does, or the next that starts"
        )
    outcome = decision.outcome or {}
    version = outcome.get("version", decision.version)
    match decision.kind:
        case "rollback":
            after = "goes on from it" if decision.training == "continue" else "is paused"
            took = max(0.0, decision.acted_at - decision.created_at)
            served = f"is served again ({took:.2f} s)" if outcome.get("served") else "is next"
            return f"version {version} {served}; training {after}"
        case "pause":
            return "training is paused; calls are served"
        case "resume":
            return "training goes on"
        case "promote":
            return f"version {version} is promoted"
        case "pin":
            return f"version {version} is pinned: its weights stay on disk"
        case _:
            return f"version {version} is not pinned any more"


def print_decision(decision: Decision, console: Console, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(decision))
    else:
        console.print(describe(decision), highlight=False, soft_wrap=True)


def versions_json(history: VersionHistory) -> Json:
    paused = history.paused
    return {
        "serving": history.serving,
        "promoted": history.promoted,
        "paused": None if paused is None else asdict(paused),
        "refused": [asdict(one) for one in history.refused],
        "versions": [asdict(one) for one in history.records.values()],
    }


def print_versions(history: VersionHistory, console: Console, *, last: int, as_json: bool) -> None:
    """The newest `last`, and all that are kept."""
    if as_json:
        print_json(versions_json(history))
        return
    if not history.records:
        console.print("no version yet: nothing was pushed", highlight=False)
        return
    shown = plain_table("version", "step", "state", "on disk", "evaluation", "decided", "ago")
    records = list(history.records.values())
    newest = {one.version for one in records[-last:]}
    for one in records:
        if one.version in newest or one.kept or one.pinned or one.serving:
            shown.add_row(*_cells(one))
    print_report(shown, console)
    if history.paused is not None:
        line = f"training is paused by {_by(history.paused)}"
        console.print(line, highlight=False, soft_wrap=True)
    if history.refused:
        last_one = history.refused[-1]
        ago, what = format_age(last_one.created_at), f"{last_one.kind} by {_by(last_one)}"
        line = f"refused {ago} ago: {what}: {last_one.refused} (--decisions)"
        console.print(line, highlight=False, soft_wrap=True)


def print_decisions(
    decisions: Sequence[Decision], console: Console, *, last: int, as_json: bool
) -> None:
    """The newest `last`, the oldest of them first."""
    if as_json:
        print_json([asdict(one) for one in decisions[-last:]])
        return
    if not decisions:
        console.print("no decision yet", highlight=False)
        return
    shown = plain_table("number", "decision", "by", "why", "came of it", "ago")
    for one in decisions[-last:]:
        what = one.kind if one.version is None else f"{one.kind} {one.version}"
        came = describe(one) if one.refused is None else f"refused: {one.refused}"
        shown.add_row(str(one.seq), what, one.by, one.reason, came, format_age(one.created_at))
    print_report(shown, console)


def _cells(one: VersionRecord) -> list[str]:
    kept = "yes" if one.kept else f"no ({one.not_kept})" if one.not_kept else "no"
    if one.kept and one.kept_bytes is not None:
        kept = f"{one.kept_bytes / 1e6:.3g} MB"
    return [
        f"{one.version}{' *' if one.serving else ''}",
        "model" if one.weights_step == 0 else str(one.step or ""),
        one.state,
        f"{kept}, pinned" if one.pinned else kept,
        _evaluation(one.evaluation),
        "" if one.decision is None else f"{one.decision.kind} by {_by(one.decision)}",
        format_age(one.created_at),
    ]


def _evaluation(found: Json | None) -> str:
    if found is None:
        return ""
    means = [
        "–" if found[name] is None else f"{found[name]:.2f}"
        for name in ("mean_candidate", "mean_baseline")
    ]
    return (
        f"{found['verdict']}: {means[0]} of {found['n_candidate']} against {means[1]} of"
        f" {found['n_baseline']}"
    )


def _by(decision: Decision) -> str:
    return f"{decision.by}: {decision.reason}"
