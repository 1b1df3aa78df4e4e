"""`trainer status`: what goes on and what happened, from the store and the run's state files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tracegrad.events import Json
from tracegrad.store import PolicyVersion, StepHistory, Store
from tracegrad.store.maintenance import total_removed
from tracegrad_trainer.launch.run_state import read_state

# However long a run is, so much of it is looked at.
RECENT_ROLLOUTS = 200
RECENT_STEPS = 100
MAX_SPLITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    stage: str  # starting | serving | stopping | stopped
    doing: str  # what the ranks do right now
    since: float | None  # unix seconds
    url: str | None
    processes: dict[str, int]  # name -> pid, of those that are alive
    version: int | None
    failed_versions: list[int]
    turns_captured: int
    turns_trained: int
    not_trained: dict[str, int]  # reason -> turns
    removed: Json  # what `tracegrad prune` took: rollouts, turns, and of these trained
    steps_total: int
    steps: list[Json]  # the newest first
    success: dict[str, Json]  # by tag `split`: mean, error, rollouts
    seconds: dict[str, float]  # by stage, of the last `seconds_steps` steps
    seconds_steps: int
    push: Json | None  # the last push that served: version, gap

    def as_json(self) -> Json:
        return asdict(self)


def collect_status(
    store: Store, state_dir: Path, *, tags: dict[str, str], steps: int = 10
) -> RunStatus:
    """`tags` are those that training selects by: turns of other rollouts are `not_selected`."""
    serve = read_state(state_dir, "serve") or {}
    ranks = read_state(state_dir, "ranks") or {}
    running = bool(serve.get("alive")) and serve.get("stage") != "stopped"
    counts = store.turn_counts(tags)
    history = StepHistory(store)
    recent = history.steps(RECENT_STEPS)
    seconds: Counter[str] = Counter()
    for step in recent:
        seconds.update(step.metrics.get("seconds", {}))
    version = store.current_version()
    pids = {name: state["pid"] for name, state in (("serve", serve), ("ranks", ranks)) if state}
    return RunStatus(
        stage=serve.get("stage", "stopped") if running else "stopped",
        doing=ranks.get("stage", "starting") if running else "",
        since=serve.get("started_at") if running else None,
        url=serve.get("url") if running else None,
        processes=pids if running else {},
        version=version,
        failed_versions=store.failed_versions(),
        turns_captured=counts.captured,
        turns_trained=counts.trained,
        not_trained={**counts.pending, **counts.skipped},
        removed=_removed(store),
        steps_total=history.count(),
        steps=[asdict(step) | {"settings": None} for step in recent[::-1][:steps]],
        success=_success(store, history),
        seconds=dict(seconds),
        seconds_steps=len(recent),
        push=None if version is None else _push(store.version_events(version)),
    )


def _removed(store: Store) -> Json:
    """Rollouts that retention removed, with their turns; {} where none were."""
    with store.reading() as connection:
        gone = total_removed(connection)
    if not gone.get("rollouts"):
        return {}
    return {name: gone.get(name, 0) for name in ("rollouts", "turns", "trained")}


def _push(events: list[PolicyVersion]) -> Json | None:
    """How far served and trained log-probabilities were apart after it."""
    served = [event for event in events if event.state == "serving"]
    if not served:
        return None
    return {"version": served[-1].version, "gap": served[-1].detail.get("gap")}


def _success(store: Store, history: StepHistory) -> dict[str, Json]:
    """Mean reward and its standard error over the newest rollouts of every split."""
    found: dict[str, Json] = {}
    for split in history.splits()[:MAX_SPLITS]:
        curve = store.reward_curve({"split": split} if split else None, limit=RECENT_ROLLOUTS)
        if not curve:
            continue
        rewards = [point.reward for point in curve]
        mean = sum(rewards) / len(rewards)
        spread = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)
        found[split or "all"] = {
            "mean": mean,
            "error": math.sqrt(spread / len(rewards)),
            "rollouts": len(rewards),
        }
    return found
