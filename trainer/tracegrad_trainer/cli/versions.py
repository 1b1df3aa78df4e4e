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
from tracegrad.inspect.decision_text import decided_by, describe_decision, evaluation_text
from tracegrad.store import Decision, Store
from tracegrad.store.read.versions import VersionHistory, VersionRecord
from tracegrad.text_format import format_age
from tracegrad_trainer.utils.console import plain_table, print_json, print_report

POLL_S = 0.05


class DecisionRefused(RuntimeError):
    """Rank 0 refused it; its own line."""


def decide(
    store: Store, decision: Decision, *, wait_s: float, sleep: Callable[[float], None] = time.sleep
) -> Decision:
    """As it stands after at most `wait_s` seconds: with `acted_at`, or nobody has acted on it yet.

    Raises:
        ValueError: it cannot be.
        DecisionRefused: rank 0 says so.
    """
    store.version_history().check_possible(decision, store.open_decisions())
    seq = store.decide(decision)
    deadline = time.monotonic() + wait_s
    while True:
        [found] = store.decisions(after=seq - 1)[:1]
        if found.refused is not None:
            raise DecisionRefused(found.refused)
        if found.acted_at is not None or time.monotonic() >= deadline:
            return found
        sleep(POLL_S)


def print_decision(decision: Decision, console: Console, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(decision))
    else:
        console.print(describe_decision(decision), highlight=False, soft_wrap=True)


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
        line = f"training is paused by {decided_by(history.paused)}"
        console.print(line, highlight=False, soft_wrap=True)
    if history.refused:
        last_one = history.refused[-1]
        ago, what = format_age(last_one.created_at), f"{last_one.kind} by {decided_by(last_one)}"
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
        came = describe_decision(one) if one.refused is None else f"refused: {one.refused}"
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
        evaluation_text(one.evaluation),
        "" if one.decision is None else f"{one.decision.kind} by {decided_by(one.decision)}",
        format_age(one.created_at),
    ]
