"""Which tasks, and which images, are worth running: a fold over their attempts and over what was
decided about them.

A rule finds two kinds that are not. One *fails*: its newest attempts all ended with a failure that
is not the policy's, and meanwhile attempts at others succeeded (where nobody does, the machine is
what fails). Of the other kind the reward *never varies*: the newest rewards are equal, over several
policy versions, so that comparing them teaches nothing. Nothing here writes: `ledger.quarantine`
records what was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    exists,
    func,
    or_,
    select,
)
from sqlalchemy.orm import InstrumentedAttribute, aliased

from tracegrad.events import Json, Outcome
from tracegrad.protocol import IMAGE_TAG
from tracegrad.store.expressions import SCORED_OUTCOMES, latest_reward
from tracegrad.store.models import Rollouts, RolloutTags, TaskDecisions, Turns
from tracegrad.store.rows import chunks, select_fields
from tracegrad.text_format import format_count

SubjectKind = Literal["task", "image"]
FAILS, EQUAL_REWARD = "rule:fails", "rule:equal_reward"
_FAILED = (Outcome.ENV_ERROR, Outcome.INFRA_ERROR)
_MAX_ERROR = 200  # characters of one, in a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRule:
    """When a task or an image is set aside. ValueError names the field.

    Attributes:
        failures: so many of the newest attempts failed, one after the other; of an image those at
            two tasks or more.
        equal_rewards: so many of the newest rewards are equal. Held-out attempts do not count.
        versions: policy versions that these are of, at least: a policy that does not change gives
            the same reward for good reasons.
        retry_after_s: seconds without an attempt after which one that is set aside may be tried
            again, where the runner asks for that.
    """

    failures: int = 8
    equal_rewards: int = 32
    versions: int = 4
    retry_after_s: float = 3600.0

    def __post_init__(self) -> None:
        for name, least in (("failures", 1), ("equal_rewards", 2), ("versions", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)}; give at least {least}")
        if not self.retry_after_s >= 0:
            raise ValueError(f"retry_after_s: {self.retry_after_s}; give seconds from 0 on")

    @property
    def looked_at(self) -> int:
        """Attempts of each, the newest: enough also where half of them were not scored."""
        return 2 * max(self.failures, self.equal_rewards)


DEFAULT_RULE = QuarantineRule()


@dataclass(frozen=True, slots=True)
class Subject:
    kind: SubjectKind
    id: str

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDecision:
    """`by` is user@host, the web page (`ui`, `ui:admin_key`), or a rule's name (`FAILS`,
    `EQUAL_REWARD`), which has `evidence`."""

    subject: SubjectKind
    subject_id: str
    kind: Literal["quarantine", "release"]
    by: str
    reason: str
    evidence: Json | None = None
    created_at: float

    @property
    def is_rules(self) -> bool:
        return self.by in (FAILS, EQUAL_REWARD)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule would decide, and why."""

    kind: Literal["quarantine", "release"]
    by: str
    reason: str
    evidence: Json


@dataclass(frozen=True, slots=True)
class SubjectHealth:
    """`state` ok, quarantined (by `decision`), or suspect: the rule would set it aside
    (`finding`), and nobody has asked for that since. `finding` of a quarantined one: the rule would
    release it."""

    subject: Subject
    state: Literal["ok", "suspect", "quarantined"]
    decision: TaskDecision | None = None  # the last one
    finding: Finding | None = None
    tried_at: float | None = None  # when its newest attempt was opened

    @property
    def why(self) -> str:
        if self.state == "quarantined" and self.decision is not None:
            return self.decision.reason
        return self.finding.reason if self.state == "suspect" and self.finding else ""

    @property
    def by(self) -> str:
        if self.state == "quarantined" and self.decision is not None:
            return self.decision.by
        return self.finding.by if self.state == "suspect" and self.finding else ""

    def may_run(self, *, retry: bool, rule: QuarantineRule, now: float) -> bool:
        """`retry`: those that were set aside long enough ago may, too."""
        if self.state != "quarantined" or self.decision is None:
            return True
        idle_since = max(self.decision.created_at, self.tried_at or 0.0)
        return retry and idle_since <= now - rule.retry_after_s


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Its fields are in the order of the columns of `_ranked`."""

    rollout_id: str
    task_id: str | None
    outcome: str
    error: str | None
    reward: float | None
    held_out: bool | None
    opened_at: float


def subject_health(
    connection: Connection,
    subjects: Collection[Subject],
    rule: QuarantineRule = DEFAULT_RULE,
    *,
    opened_from: Mapping[str, float] | None = None,
) -> list[SubjectHealth]:
    """How each stands, in their order. `opened_from`: of these tasks, which have very many
    attempts, those that were opened earlier are not looked at."""
    decided = last_decisions(connection, subjects)
    attempts = _newest_attempts(connection, subjects, rule.looked_at, opened_from or {})
    tried = _tried_at(connection, subjects, opened_from or {})
    found = []
    for subject in subjects:
        last, of_it = decided.get(subject), attempts.get(subject, [])
        finding = _finding(connection, subject, last, of_it, rule)
        state: Literal["ok", "suspect", "quarantined"] = "suspect" if finding else "ok"
        if last is not None and last.kind == "quarantine":
            state = "quarantined"
        found.append(SubjectHealth(subject, state, last, finding, tried.get(subject)))
    return found


def known_images(connection: Connection) -> list[Subject]:
    """That rollouts ran in, by name."""
    query = select(RolloutTags.value).where(RolloutTags.key == IMAGE_TAG).distinct()
    return [
        Subject("image", name) for name in connection.scalars(query.order_by(RolloutTags.value))
    ]


def is_known(connection: Connection, subject: Subject) -> bool:
    """Whether a rollout is of it."""
    where = Rollouts.task_id == subject.id if subject.kind == "task" else _ran_in([subject.id])
    return connection.scalar(select(Rollouts.rollout_id).where(where).limit(1)) is not None


def _finding(
    connection: Connection,
    subject: Subject,
    last: TaskDecision | None,
    attempts: Sequence[_Attempt],
    rule: QuarantineRule,
) -> Finding | None:
    since = 0.0 if last is None else last.created_at
    newer = [each for each in attempts if each.opened_at > since]
    if last is not None and last.kind == "quarantine":
        return _recovered(last, newer) if last.is_rules else None
    found = _fails(subject, newer, rule)
    if found is not None and not _others_succeeded(connection, subject, found.evidence["since"]):
        found = None
    if found is None and subject.kind == "task":
        found = _equal_rewards(connection, newer, rule)
    return found


def _fails(subject: Subject, attempts: Sequence[_Attempt], rule: QuarantineRule) -> Finding | None:
    newest = [*takewhile(lambda each: each.outcome in _FAILED, attempts)]
    if len(newest) < rule.failures:
        return None
    tasks = {each.task_id for each in newest}
    if subject.kind == "image" and len(tasks) < 2:
        return None  # it may be the task
    outcomes = Counter(each.outcome for each in newest)
    errors = Counter(each.error for each in newest if each.error)
    [(error, times)] = errors.most_common(1) or [("", 0)]
    said = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    text = f"the last {format_count(len(newest), 'attempt')} failed ({said})"
    if subject.kind == "image":
        text += f", at {format_count(len(tasks), 'task')}"
    if error:
        text += f"; {times} with: {' '.join(error.split())[:_MAX_ERROR]}"
    evidence = {
        "attempts": len(newest),
        "outcomes": dict(outcomes),
        "error": error or None,
        "tasks": len(tasks),
        "since": newest[-1].opened_at,
    }
    return Finding("quarantine", FAILS, text, evidence)


def _equal_rewards(
    connection: Connection, attempts: Iterable[_Attempt], rule: QuarantineRule
) -> Finding | None:
    newest = [each for each in attempts if _is_trained(each)][: rule.equal_rewards]
    if len(newest) < rule.equal_rewards or len({each.reward for each in newest}) > 1:
        return None
    versions = _last_versions(connection, [each.rollout_id for each in newest])
    if len(versions) < rule.versions:
        return None
    reward = newest[0].reward
    text = (
        f"the last {len(newest)} rewards are all {reward:g}, over {len(versions)} policy versions:"
        " comparing them teaches nothing"
    )
    evidence = {
        "attempts": len(newest),
        "reward": reward,
        "versions": len(versions),
        "since": newest[-1].opened_at,
    }
    return Finding("quarantine", EQUAL_REWARD, text, evidence)


def _last_versions(connection: Connection, rollout_ids: Sequence[str]) -> set[int]:
    """The newest policy versions that sampled the rollouts' turns."""
    query, found = _last_version_query(), set[int | None]()
    for some in chunks(rollout_ids):
        found |= {*connection.scalars(query, {"rollout_ids": some})}
    return {version for version in found if version is not None}


@cache
def _last_version_query() -> Select[int | None]:
    of_rollouts = Turns.rollout_id.in_(bindparam("rollout_ids", expanding=True))
    return select(func.max(Turns.last_version)).where(of_rollouts).group_by(Turns.rollout_id)


def _recovered(last: TaskDecision, newer: Sequence[_Attempt]) -> Finding | None:
    """Whether attempts since then say otherwise."""
    if last.by == FAILS:
        good = [each for each in newer if each.outcome in SCORED_OUTCOMES]
        text = f"{format_count(len(good), 'attempt')} since then did not fail"
    else:
        reward = (last.evidence or {}).get("reward")
        good = [each for each in newer if _is_trained(each) and each.reward != reward]
        text = f"{format_count(len(good), 'reward')} since then differ from it"
    return Finding("release", last.by, text, {"attempts": len(good)}) if good else None


def _is_trained(attempt: _Attempt) -> bool:
    return (
        attempt.reward is not None and attempt.outcome in SCORED_OUTCOMES and not attempt.held_out
    )


def _others_succeeded(connection: Connection, subject: Subject, since: float) -> bool:
    """Else it is the machine that fails, or the proxy, and not this one."""
    mine: ColumnElement[bool] = Rollouts.task_id == subject.id
    if subject.kind == "image":
        mine = _ran_in([subject.id])
    query = (
        select(Rollouts.rollout_id)
        .where(
            Rollouts.finished_at >= since,
            Rollouts.outcome.in_(SCORED_OUTCOMES),
            ~func.coalesce(mine, False),
        )
        # One that ended lately was most likely opened lately; no index has the ends alone.
        .order_by(Rollouts.opened_at.desc())
        .limit(1)
    )
    return connection.scalar(query) is not None


def _ran_in(images: Collection[str]) -> ColumnElement[bool]:
    return exists().where(
        RolloutTags.rollout_id == Rollouts.rollout_id,
        RolloutTags.key == IMAGE_TAG,
        RolloutTags.value.in_(images),
    )


def last_decisions(
    connection: Connection, subjects: Collection[Subject]
) -> dict[Subject, TaskDecision]:
    """Of those about which something was decided."""
    found: dict[Subject, TaskDecision] = {}
    query = select_fields(TaskDecision, TaskDecisions).order_by(TaskDecisions.seq)
    for kind, ids in _by_kind(subjects).items():
        for some in chunks(ids):
            where = (TaskDecisions.subject == kind, TaskDecisions.subject_id.in_(some))
            for row in connection.execute(query.where(*where)).mappings():
                decision = TaskDecision(**row)
                found[Subject(decision.subject, decision.subject_id)] = decision
    return found


def quarantined(connection: Connection) -> list[Subject]:
    """All that stand so, whether rollouts of them are there or not."""
    newest = select(func.max(TaskDecisions.seq)).group_by(
        TaskDecisions.subject, TaskDecisions.subject_id
    )
    query = select(TaskDecisions.subject, TaskDecisions.subject_id).where(
        TaskDecisions.seq.in_(newest), TaskDecisions.kind == "quarantine"
    )
    rows = connection.execute(query.order_by(TaskDecisions.seq))
    return [Subject("image" if kind == "image" else "task", name) for kind, name in rows]


def _newest_attempts(
    connection: Connection,
    subjects: Collection[Subject],
    most: int,
    opened_from: Mapping[str, float],
) -> dict[Subject, list[_Attempt]]:
    """Those that ended, the newest first; what was aborted says nothing."""
    found: dict[Subject, list[_Attempt]] = {}
    for kind, ids in _by_kind(subjects).items():
        for some in chunks(ids):
            for name, *values in connection.execute(_ranked(kind, some, most, opened_from)):
                found.setdefault(Subject(kind, name), []).append(_Attempt(*values))
    return found


def _ranked(
    kind: SubjectKind, ids: Sequence[str], most: int, opened_from: Mapping[str, float]
) -> Select[*tuple[Any, ...]]:
    """The newest `most` of each, by one pass over the rows of these, each of which is read once;
    rewards are looked up for those alone."""
    tag = aliased(RolloutTags)
    subject = Rollouts.task_id if kind == "task" else tag.value
    order = (Rollouts.finished_at.desc(), Rollouts.rollout_id.desc())
    rank = func.row_number().over(partition_by=subject, order_by=order)
    ended = select(
        Rollouts.rollout_id,
        subject.label("subject"),
        rank.label("rank"),
        Rollouts.task_id,
        Rollouts.outcome,
        Rollouts.error,
        Rollouts.held_out,
        Rollouts.opened_at,
    )
    if kind == "image":
        of_image = (tag.rollout_id == Rollouts.rollout_id) & (tag.key == IMAGE_TAG)
        ended = ended.join(tag, of_image)
    newest = ended.where(
        _is_one_of(subject, kind, ids, opened_from),
        Rollouts.finished_at.is_not(None),
        Rollouts.outcome != Outcome.ABORTED.value,
    ).subquery()
    found = newest.c
    return (
        select(
            found.subject,
            found.rollout_id,
            found.task_id,
            found.outcome,
            found.error,
            latest_reward(of=found.rollout_id).label("reward"),
            found.held_out,
            found.opened_at,
        )
        .where(found.rank <= most)
        .order_by(found.subject, found.rank)
    )


def _is_one_of(
    subject: InstrumentedAttribute[Any],
    kind: SubjectKind,
    ids: Sequence[str],
    opened_from: Mapping[str, float],
) -> ColumnElement[bool]:
    bounded = [one for one in ids if kind == "task" and one in opened_from]
    newer = [and_(subject == one, Rollouts.opened_at >= opened_from[one]) for one in bounded]
    return or_(subject.in_([one for one in ids if one not in {*bounded}]), *newer)


def _tried_at(
    connection: Connection, subjects: Collection[Subject], opened_from: Mapping[str, float]
) -> dict[Subject, float]:
    """When the newest attempt was opened, ended or not."""
    found: dict[Subject, float] = {}
    for kind, ids in _by_kind(subjects).items():
        for some in chunks(ids):
            subject = Rollouts.task_id if kind == "task" else RolloutTags.value
            query = select(subject, func.max(Rollouts.opened_at)).group_by(subject)
            if kind == "image":
                query = query.join(RolloutTags, RolloutTags.rollout_id == Rollouts.rollout_id)
                query = query.where(RolloutTags.key == IMAGE_TAG)
            where = _is_one_of(subject, kind, some, opened_from)
            for name, at in connection.execute(query.where(where)):
                found[Subject(kind, str(name))] = at
    return found


def _by_kind(subjects: Collection[Subject]) -> Mapping[SubjectKind, list[str]]:
    found: dict[SubjectKind, list[str]] = {}
    for subject in dict.fromkeys(subjects):
        found.setdefault(subject.kind, []).append(subject.id)
    return found
