"""`trainer status`: what goes on and what happened, from the store and the run's state files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tracegrad.records import Json
from tracegrad.store import Ledger, Store
from tracegrad_trainer.run_state import read_state

RECENT_ROLLOUTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
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
    steps_total: int
    steps: list[Json]  # the newest first
    success: dict[str, Json]  # by tag `split`: mean, error, rollouts
    seconds: dict[str, float]  # where the trainer's time went, by stage

    def as_json(self) -> Json:
        return asdict(self)


def status(store: Store, state_dir: Path, *, tags: dict[str, str], steps: int = 10) -> Status:
    """`tags` are those that training selects by: turns of other rollouts are `not_selected`."""
    serve = read_state(state_dir, "serve") or {}
    ranks = read_state(state_dir, "ranks") or {}
    running = bool(serve.get("alive")) and serve.get("stage") != "stopped"
    counts = store.turn_counts(tags)
    ledger = Ledger(store)
    last = ledger.last_step()
    every = ledger.steps(limit=None)
    seconds: Counter[str] = Counter()
    for step in every:
        seconds.update(step.metrics.get("seconds", {}))
    pids = {name: state["pid"] for name, state in (("serve", serve), ("ranks", ranks)) if state}
    return Status(
        stage=serve.get("stage", "stopped") if running else "stopped",
        doing=ranks.get("stage", "starting") if running else "",
        since=serve.get("started_at") if running else None,
        url=serve.get("url") if running else None,
        processes=pids if running else {},
        version=store.current_version(),
        failed_versions=[v.version for v in store.versions() if v.state == "failed"],
        turns_captured=counts.captured,
        turns_trained=counts.trained,
        not_trained={**counts.pending, **counts.skipped},
        steps_total=last.step if last else 0,
        steps=[asdict(step) | {"settings": None} for step in every[::-1][:steps]],
        success=_success(store),
        seconds=dict(seconds),
    )


def _success(store: Store) -> dict[str, Json]:
    """Mean reward and its standard error over the newest rollouts of every split."""
    splits = {row.tags.get("split", "") for row in store.rollouts(limit=5000)}
    found: dict[str, Json] = {}
    for split in sorted(splits):
        curve = store.reward_curve({"split": split} if split else None)[-RECENT_ROLLOUTS:]
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
