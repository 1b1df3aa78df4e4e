"""What queries and the ledger answer with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

from sqlalchemy import Connection

from tracegrad.events import Json, Outcome, Reward, Span, Turn

# `sampling["source"]` of turns that were copied from a demonstration. Stores of before the first
# release hold the second word (`read.turns`).
DEMONSTRATION, OLD_DEMONSTRATION = "demonstration", "expert"

# `Reward.source` of what a judge gave: the trainer asks it for groups that it has leased.
JUDGE_SOURCE = "judge"
RULE_SOURCE = "rule"  # a setting of the trainer's
# Of the parts that scorers gave, and of the sum that was made of a rollout's parts.
SCORER_SOURCE, COMPOSED_SOURCE = "scorer", "composed"
# Why a turn was skipped that came in after its rollout was leased; nobody trained on it.
LATE = "late"
# Why one was skipped whose rollout is for evaluation alone: it is marked so, or carries
# `promotion.tags`. The state of a marked one that is not consumed.
HELD_OUT = "held_out"
# States of rollouts whose turns may still be trained (`expressions.training_state`).
PENDING_STATES = (
    "open",
    "no_turns",
    "no_reward",
    "named_reward",
    "scoring_failed",
    "no_task",
    "waiting",
    "leased",
    "not_selected",
)


class Readable(Protocol):
    """The store, for what is below it."""

    def reading(self) -> AbstractContextManager[Connection]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """One rollout in a list.

    `state` on the way to training: `open`, an unscored outcome's name, `no_turns`, `no_reward`,
    `named_reward`, `scoring_failed`, `leased`, `no_task`, `waiting`, `held_out` (marked so, however
    else it stands) or `consumed` (trained or skipped: `consumed_step`). A rollout that
    `continues` another is one that nobody named, whose conversation goes on from that one, which
    training had by then.
    """

    rollout_id: str
    task_id: str | None
    agent: str | None
    tags: dict[str, str]
    outcome: Outcome | None
    error: str | None
    opened_at: float
    finished_at: float | None
    reward: float | None
    turns: int
    completion_tokens: int
    trained_turns: int
    state: str
    consumed_step: int | None
    # Nobody reported its end: it was closed after so many seconds without a call.
    idle_s: float | None = None
    continues: str | None = None  # the rollout that its conversation goes on from
    opened: bool = True  # by somebody; False: calls belong to it, and nobody said more
    last_turn_at: float | None = None  # of one that has no end
    held_out: bool = False  # who opened it said that it is never to be trained


@dataclass(frozen=True, slots=True)
class TurnDisposition:
    """A turn's row in the ledger: trained by `step`, or not trained because of `skip_reason`.

    `advantage` is the turn's in that step, in units of reward or of its deviation
    (`objective.advantage`). None: its tokens have one each, as GAE's do, or it is not known."""

    step: int | None
    skip_reason: str | None
    created_at: float | None = None  # where it was asked for
    advantage: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a scorer ended with a rollout that had so many turns then. `state` `unknown`: it said
    that it cannot tell; `failed`: `error` says why, after so many attempts. `parts`: the rewards
    that it gave, by name. `digest` is of its source, command or settings."""

    rollout_id: str
    scorer: str
    digest: str
    turns: int
    round: int
    state: Literal["scored", "unknown", "failed"]
    attempts: int = 1
    error: str | None = None
    seconds: float = 0.0
    parts: Mapping[str, float | None] | None = None
    created_at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDetail:
    summary: RolloutSummary
    task: Any
    turns: list[Turn]  # in order of capture
    rewards: list[Reward]  # in order of arrival
    spans: list[Span]  # by start
    dispositions: dict[str, TurnDisposition]  # by turn id; a turn without one still waits
    # Without turns: the calls that named no rollout and came while it was open.
    unnamed_calls: int = 0
    # Whether training took its rewards; those that arrived later, by id, changed nothing.
    rewards_taken: bool = False
    late_rewards: frozenset[str] = frozenset()
    trainer_idle_s: float | None = None  # `data.idle_s` as the last step was made with
    scorings: Sequence[Scoring] = ()  # in order; of each scorer the last one counts

    @property
    def failed_scorings(self) -> list[Scoring]:
        """Those that failed, and that no later one of their scorer replaced."""
        last = {each.scorer: each for each in self.scorings}
        return [each for each in last.values() if each.state == "failed"]

    def came_late(self, reward: Reward) -> bool:
        """Whether the reward arrived after training had taken the rollout's."""
        return reward.reward_id in self.late_rewards


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """`captured == trained + sum(skipped) + sum(pending)`, always."""

    captured: int
    trained: int
    skipped: dict[str, int]
    pending: dict[str, int]


class RewardPoint(NamedTuple):
    finished_at: float
    reward: float
    version: int | None  # the newest policy version that sampled for the rollout


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """What became of a version. Of its push: pushing, serving (again, after a rollback), failed, or
    superseded by a rollback. Beside that (`Store.note_version`): its weights are kept on disk, or
    not_kept, and why; it was evaluated, with the result."""

    version: int
    step: int | None
    state: Literal["pushing", "serving", "failed", "superseded", "kept", "not_kept", "evaluated"]
    created_at: float = field(default_factory=time.time)
    detail: Json = field(default_factory=dict)


DecisionKind = Literal["promote", "rollback", "pin", "unpin", "pause", "resume"]
_DECISION_KINDS = get_args(DecisionKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What somebody decided about policy versions, or about training.

    `version`: of promote, pin and unpin; of a rollback too, or None: the last good one before what
    is served. `training`: of a rollback, whether training goes on from that version or is paused.
    `by` is user@host, or a guard's name. `seq`, `acted_at` and `outcome` are the store's: its
    number, when rank 0 acted on it, and what came of that ("refused": why nothing was done).

    ValueError names the field.
    """

    kind: DecisionKind
    by: str
    reason: str
    version: int | None = None
    training: Literal["continue", "pause"] | None = None
    created_at: float = field(default_factory=time.time)
    seq: int | None = None
    acted_at: float | None = None
    outcome: Json | None = None

    def __post_init__(self) -> None:
        if self.kind not in _DECISION_KINDS:
            raise ValueError(f"kind: {self.kind!r} is none of {', '.join(_DECISION_KINDS)}")
        if self.kind in ("promote", "pin", "unpin") and self.version is None:
            raise ValueError(f"version: {self.kind} needs one")
        if self.kind in ("pause", "resume") and self.version is not None:
            raise ValueError(f"version: {self.kind} is of training, not of a version; leave it out")
        if self.version is not None and self.version < 0:
            raise ValueError(f"version: {self.version}; versions begin with 0")
        if self.kind == "rollback" and self.training not in ("continue", "pause"):
            raise ValueError(f"training: {self.training!r}; a rollback has continue or pause")
        if self.kind != "rollback" and self.training is not None:
            raise ValueError(f"training: {self.kind} has none; leave it out")
        if not self.by or not self.reason.strip():
            name = "reason" if self.by else "by"
            raise ValueError(f"{name}: is empty; every decision says who made it, and why")

    @property
    def pauses(self) -> bool:
        """Whether training is paused by it."""
        return "pause" in (self.kind, self.training)

    @property
    def refused(self) -> str | None:
        """Why nothing was done about it."""
        return None if self.outcome is None else self.outcome.get("refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step. `version` is the policy version that its weights become.

    `batch` says what it was made of (the trainer's `BatchRecord`): enough to run it again.
    `run_id` is the state folder that made it. `checkpoint` is null where a later step's has it too
    (`checkpoint.every_steps`). `manifest_digest` is the SHA-256 of the manifest in `checkpoint`;
    `parent_digest` that of the last checkpoint before it, whose weights it began with, or those of
    the steps since. Null: not known (of revision 0006 and before), `parent_digest` also where there
    was no checkpoint yet.
    """

    step: int
    version: int
    created_at: float = field(default_factory=time.time)
    settings: Json = field(default_factory=dict)
    metrics: Json = field(default_factory=dict)
    checkpoint: str | None = None
    batch: Json | None = None
    run_id: str | None = None
    manifest_digest: str | None = None
    parent_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommit:
    """A step with what it consumes.

    `trained` are turn ids, `skipped` maps turn ids to reasons. Turns of `rollouts` that are in
    neither came in after the lease and are skipped as "late". `leases` maps rollouts to the leases
    that they were given out under (`lease_by_rollout`); one that is not in it must not be leased to
    anybody. `advantages` of trained turns, by id; those that have none are left out.
    """

    step: StepRecord
    trained: Sequence[str]
    skipped: Mapping[str, str]
    rollouts: Sequence[str]
    leases: Mapping[str, str] = field(default_factory=dict)
    advantages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    """A finished, scored, rewarded rollout with all its turns (without raw requests).

    `turn_rewards` maps a turn's index in `turns` to its latest reward named "reward";
    `deciding_turn` is the index of the turn whose latest reward named "deciding" is above 0.
    """

    rollout_id: str
    task_id: str | None
    agent: str | None
    tags: Mapping[str, str]
    outcome: Outcome
    reward: float
    turn_rewards: dict[int, float]
    turns: list[Turn]
    deciding_turn: int | None = None


@dataclass(frozen=True, slots=True)
class AgentTurns:
    """Of an agent that its calls named: turns that were captured, and those that were trained."""

    captured: int
    trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts to compare with each other, leased together until `expires_at`."""

    group_id: str  # the task's id, or the rollout's where there is no task
    lease_id: str
    expires_at: float
    rollouts: list[RolloutSample]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteGroup:
    """Ready rollouts of a task that are too few for a group, and who may still join them."""

    task_id: str
    ready: list[str]
    since: float  # the first of them finished
    open: int
    no_reward: int
    no_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePreview:
    """What a lease would give; `more` groups are ready beyond those asked for."""

    groups: list[Group]
    more: int
    incomplete: list[IncompleteGroup]
    idle: int  # rollouts that would be closed before, `MOST_CLOSED` at most
    idle_before: float | None  # those without a call since then; None: none would be
    inferred_open: InferredOpen  # the others that nobody opened


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredOpen:
    """Rollouts with turns that nobody opened and that have no end, at most
    `ledger.idle.MOST_LOOKED_AT`. `idle_for_s`: of the one without a call for the longest time;
    below 0 where the proxy's clock is ahead; None: there is none."""

    rollouts: int
    idle_for_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """That `owner` had a rollout to train on. Times are seconds since the epoch."""

    lease_id: str
    rollout_id: str
    owner: str
    leased_at: float
    leased_until: float
    released_at: float | None  # given back, or consumed; None: until it ended by itself

    def state(self, now: float) -> Literal["held", "released", "expired"]:
        if self.released_at is not None:
            return "released"
        return "held" if now < self.leased_until else "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLease:
    """That a rollout is not under `lease_id` (None: under none) any more, and who has it now."""

    rollout_id: str
    lease_id: str | None
    state: Literal["leased", "free", "consumed", "removed"]
    owner: str | None = None
    leased_until: float | None = None
    step: int | None = None

    def __str__(self) -> str:
        rollout = f"rollout {self.rollout_id}"
        if self.state == "removed":
            return f"{rollout} was removed from the store"
        if self.state == "consumed":
            by = "was skipped" if self.step is None else f"was consumed by step {self.step}"
            return f"{rollout} {by} already"
        if self.lease_id is None:
            return f"{rollout} is leased to {self.owner}: only its lease can consume it"
        has = "nobody has it now" if self.state == "free" else f"{self.owner} has it now"
        return f"{rollout} is no longer under lease {self.lease_id}: {has}"


def lease_by_rollout(groups: Iterable[Group]) -> dict[str, str]:
    """Rollout -> the lease that it was given out under."""
    return {each.rollout_id: group.lease_id for group in groups for each in group.rollouts}
