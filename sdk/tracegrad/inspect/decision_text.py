"""Decisions about versions and evaluations of them, as the command line and the web page say it."""

from __future__ import annotations

from tracegrad.events import Json
from tracegrad.inspect.metric_points import finite_number
from tracegrad.store import Decision


def describe_decision(decision: Decision) -> str:
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


def evaluation_text(found: Json | None) -> str:
    """The gate's verdict and what it is of; empty: there is none."""
    if found is None:
        return ""
    means = [
        "–" if (mean := finite_number(found.get(name))) is None else f"{mean:.2f}"
        for name in ("mean_candidate", "mean_baseline")
    ]
    counts = [found.get(name, "?") for name in ("n_candidate", "n_baseline")]
    return (
        f"{found.get('verdict', '?')}: {means[0]} of {counts[0]} against {means[1]} of {counts[1]}"
    )


def decided_by(decision: Decision) -> str:
    """Who, and why."""
    return f"{decision.by}: {decision.reason}"
