"""`trainer status`: what goes on and what happened, from the store and the run's state files."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tracegrad.events import Json
from tracegrad.store import Decision, PolicyVersion, StepHistory, Store, TurnCounts
from tracegrad.store.expressions import training_state
from tracegrad.store.ledger.group_cut import OVER_SAMPLED
from tracegrad.store.ledger.intake import Intake
from tracegrad.store.maintenance import total_removed
from tracegrad.store.read.reward_arrival import RECENT_REWARDS
from tracegrad.store.read.scorings import scoring_failures
from tracegrad_trainer.cli.notices import unmatched_patterns_of
from tracegrad_trainer.launch.run_journal import RunRecord, read_runs
from tracegrad_trainer.launch.run_state import is_at_work, read_state, run_id
from tracegrad_trainer.rl.wait_reason import BatchNeeds, wait_reason

# However long a run is, so much of it is looked at.
RECENT_ROLLOUTS = 200
RECENT_STEPS = 100
MAX_SPLITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    stage: str  # starting | serving | stopping | stopped | stepping (`trainer step` runs)
    doing: str  # what the ranks do right now
    since: float | None  # unix seconds
    doing_since: float | None
    begins: str | None  # with what the run began, or resumed
    last_run: Json | None  # `RunRecord`: the one that runs, or how the last one ended
    damaged_records: int  # lines of the journal of runs that cannot be read
    last_seen: float | None  # of a run that ended without a word: its last sign
    paused: Json | None  # training is: by, reason, created_at
    refused: Json | None  # the newest decision, if it was: kind, by, reason, created_at, why
    held: str | None  # why nothing is leased, while it runs: a pause, or the promotion gate
    waiting_for: str | None  # why nothing trains; None: something does, or nothing is known
    unmatched: list[str]  # patterns of batches that no turn has fitted so far, a line each
    url: str | None
    placement: str | None  # of `trainer serve`: who is on which GPUs
    parts: dict[str, Json]  # of those that were started again: restarts, up, last_end, last_end_at
    absent_workers: list[str]  # that ranks of another launcher need, and that nobody has started
    processes: dict[str, int]  # name -> pid, of those that are alive
    version: int | None
    failed_versions: list[int]
    pending_steps: list[int]  # made, and not committed; where nothing runs, lost with the run
    turns_captured: int
    turns_trained: int
    not_trained: dict[str, int]  # reason -> turns
    late_rewards: Json  # that came after training, of the newest: rewards, rollouts, of
    scorings: dict[str, Json]  # by scorer: scored, unknown, failed, seconds of all together
    scoring_failures: list[Json]  # of rollouts that have no reward: scorer, error, rollouts
    removed: Json  # what `tracegrad prune` took: rollouts, turns, and of these trained
    steps_total: int
    steps: list[Json]  # the newest first
    success: dict[str, Json]  # by tag `split`: mean, error, rollouts
    seconds: dict[str, float]  # by stage, of the last `seconds_steps` steps
    seconds_steps: int
    lags: dict[str, float]  # versions of lag -> share of the sampled tokens of the same steps
    dropped: dict[str, float]  # stale, over_sampled -> share of the turns of the whole run
    intake: Json | None  # paced, rollouts, reason, silent_for_s, places, waited_s; None: none asks
    resampled: Json | None  # live prompts, by this worker: prompts, rollouts, failed, unusable
    evaluator: Json | None  # tasks of the gate, by this worker: version, passes, failed, error
    push: Json | None  # the last push that served: version, seconds, paused_s, held_s, gap

    def as_json(self) -> Json:
        return asdict(self)


_DROPPED = ("stale", OVER_SAMPLED)
_LAG_SHARE = "lag_share_"
_STAGES = {"trainer step": "stepping", "torchrun": "serving"}


def collect_status(
    store: Store, state_dir: Path, *, resolved: Json | None = None, steps: int = 10
) -> RunStatus:
    """`resolved`: the settings of the last run, which say what training selects and waits for."""
    resolved = resolved or {}
    tags = resolved.get("data", {}).get("tags", {})
    serve = read_state(state_dir, "serve") or {}
    ranks = read_state(state_dir, "ranks") or {}
    journal = read_runs(state_dir)
    last = journal.runs[-1] if journal.runs else None
    serving = bool(serve.get("alive")) and serve.get("stage") != "stopped"
    # The journal has it from its first moment on, run/serve.json a little later.
    begun = last if last is not None and last.alive and last.ended_at is None else None
    running = serving or begun is not None
    since = serve.get("started_at") if serving else begun.started_at if begun else None
    stage = "stopped" if begun is None else _STAGES.get(begun.command, "starting")
    doing = ranks.get("stage", "starting") if running else ""
    compared = resolved.get("batches", {}).get("group_size", 1) > 1
    counts = store.turn_counts(tags, compared=compared)
    history = StepHistory(store)
    recent = history.steps(RECENT_STEPS)
    seconds: Counter[str] = Counter()
    for step in recent:
        seconds.update(step.metrics.get("seconds", {}))
    version = store.current_version()
    pause = store.training_pause()
    pids = {name: state["pid"] for name, state in (("serve", serve), ("ranks", ranks)) if state}
    return RunStatus(
        stage=serve.get("stage", "stopped") if serving else stage,
        doing=doing,
        since=since,
        doing_since=ranks.get("stage_since") if running else None,
        begins=ranks.get("begins") if running else None,
        last_run=None if last is None else last.as_json(),
        damaged_records=journal.damaged,
        last_seen=_last_seen(last, serve, ranks),
        paused=None if pause is None else _pause(pause),
        refused=_refused(store),
        held=ranks.get("held") if running and doing == "held" else None,
        waiting_for=_waiting_for(
            store,
            state_dir,
            resolved,
            url=serve.get("url"),
            running=running,
            given_back=ranks.get("given_back") if running else None,
        )
        if not running or doing == "waiting"
        else None,
        unmatched=list(unmatched_patterns_of(state_dir).values()) if running else [],
        url=serve.get("url") if serving else None,
        placement=serve.get("placement") if serving else None,
        parts=_parts(serve, state_dir, serving=serving),
        absent_workers=_absent(ranks, state_dir) if running else [],
        processes=pids if running else {},
        version=version,
        failed_versions=store.failed_versions(),
        pending_steps=_pending(ranks, recent[-1].step if recent else 0),
        turns_captured=counts.captured,
        turns_trained=counts.trained,
        not_trained={**counts.pending, **counts.skipped},
        late_rewards=_late_rewards(store),
        scorings={name: asdict(each) for name, each in store.count_scorings()[0].items()},
        scoring_failures=_scoring_failures(store, tags),
        removed=_removed(store),
        steps_total=history.count(),
        steps=[asdict(step) | {"settings": None} for step in recent[::-1][:steps]],
        success=_success(store, history),
        seconds=dict(seconds),
        seconds_steps=len(recent),
        lags=lag_shares([step.metrics for step in recent]),
        dropped=dropped_shares(counts),
        intake=_intake(store, [step.metrics for step in recent]),
        resampled=_resampled(state_dir) if running else None,
        evaluator=_evaluator(state_dir) if running else None,
        push=None if version is None else _push(store.version_events(version)),
    )


def _parts(serve: Json, state_dir: Path, *, serving: bool) -> dict[str, Json]:
    """Of `trainer serve`, or of `trainer workers` beside ranks of another launcher."""
    if serving:
        return dict(serve.get("parts", {}))
    workers = read_state(state_dir, "workers") or {}
    working = workers.get("alive") and workers.get("stage") == "working"
    return dict(workers.get("parts", {})) if working else {}


def _absent(ranks: Json, state_dir: Path) -> list[str]:
    return [name for name in ranks.get("workers", []) if not is_at_work(state_dir, name)]


def _resampled(state_dir: Path) -> Json | None:
    state = read_state(state_dir, "resampling")
    if state is None or not state["alive"]:
        return None
    return {name: state[name] for name in ("prompts", "rollouts", "failed", "unusable")}


def _evaluator(state_dir: Path) -> Json | None:
    state = read_state(state_dir, "evaluator")
    if state is None or not state["alive"]:
        return None
    return {name: state[name] for name in ("version", "passes", "failed", "error")}


def _pause(decision: Decision) -> Json:
    return {"by": decision.by, "reason": decision.reason, "created_at": decision.created_at}


def _refused(store: Store) -> Json | None:
    """The newest decision, if nothing was done about it."""
    decided = [one for one in store.decisions() if one.acted_at is not None]
    if not decided or decided[-1].refused is None:
        return None
    return _pause(decided[-1]) | {"kind": decided[-1].kind, "why": decided[-1].refused}


def _pending(ranks: Json, committed: int) -> list[int]:
    """A rank that is killed between a commit and its note of it has noted too many."""
    return [step for step in ranks.get("pending", []) if step > committed]


def _waiting_for(
    store: Store,
    state_dir: Path,
    resolved: Json,
    *,
    url: str | None,
    running: bool,
    given_back: str | None,
) -> str | None:
    ours = run_id(state_dir) if (state_dir / "run" / "id").exists() else None
    try:
        needs = BatchNeeds.of(resolved, url)
    except (KeyError, TypeError, AttributeError):  # there are none, or of another version
        return None
    return wait_reason(store, needs, ours, running=running, given_back=given_back).text


def _last_seen(last: RunRecord | None, *states: Json) -> float | None:
    """When the processes of a run that ended without a word said something last."""
    if last is None or last.alive or last.ended_at is not None:
        return None
    return max(last.started_at, *(float(state.get("updated_at", 0.0)) for state in states))


def _late_rewards(store: Store) -> Json:
    """Of the newest; {} where none was late."""
    found = store.late_rewards()
    if not found.rewards:
        return {}
    looked_at = min(found.last, RECENT_REWARDS)
    return {"rewards": found.rewards, "rollouts": found.rollouts, "of": looked_at}


def _scoring_failures(store: Store, tags: Mapping[str, str]) -> list[Json]:
    with store.reading() as connection:
        state = training_state(tags, time.time())
        return [asdict(each) for each in scoring_failures(connection, state == "scoring_failed")]


def _removed(store: Store) -> Json:
    """Rollouts that retention removed, with their turns; {} where none were."""
    with store.reading() as connection:
        gone = total_removed(connection)
    if not gone.get("rollouts"):
        return {}
    return {name: gone.get(name, 0) for name in ("rollouts", "turns", "trained")}


def lag_shares(steps: Sequence[Json]) -> dict[str, float]:
    """Of the tokens that these steps' batches sampled, by lag; {} where none knows it."""
    by_lag: Counter[str] = Counter()
    tokens = 0.0
    for metrics in steps:
        sampled = metrics.get("sampled_tokens", 0.0)
        tokens += sampled
        for name, share in metrics.items():
            if name.startswith(_LAG_SHARE):
                by_lag[name.removeprefix(_LAG_SHARE)] += sampled * share
    return {lag: by_lag[lag] / tokens for lag in sorted(by_lag, key=int)} if tokens else {}


def dropped_shares(counts: TurnCounts) -> dict[str, float]:
    """Of all turns that were trained or skipped, those that asynchrony costs, by reason."""
    decided = counts.trained + sum(counts.skipped.values())
    return {why: counts.skipped.get(why, 0) / decided for why in _DROPPED} if decided else {}


def _intake(store: Store, steps: Sequence[Json]) -> Json | None:
    """Of drivers; None where no trainer ever asked for rollouts, or the last one has ended."""
    state = Intake(store).state()
    if state.silent_for_s is None:
        return None
    return {
        "paced": state.paced,
        "rollouts": state.capacity.rollouts,
        "reason": state.reason,
        "silent_for_s": state.silent_for_s,
        "places": int(sum(metrics.get("intake_places", 0.0) for metrics in steps)),
        "waited_s": sum(metrics.get("intake_waited_s", 0.0) for metrics in steps),
    }


def _push(events: list[PolicyVersion]) -> Json | None:
    """How long it took, and how far served and trained log-probabilities were apart after it."""
    served = [event for event in events if event.state == "serving"]
    if not served:
        return None
    detail = served[-1].detail
    return {
        "version": served[-1].version,
        "seconds": sum(detail.get("seconds", {}).values()),
        "paused_s": detail.get("paused_s"),
        "held_s": detail.get("held_s"),
        "gap": detail.get("gap"),
    }


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
