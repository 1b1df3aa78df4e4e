"""The tables. Migrations in `migrations/versions` build exactly these; a test compares them.

Events are written once: `rollouts`, `turns`, `spans`, `rewards`, `scorings`, `outcomes`, `steps`,
`leases`, `turn_ledger`, `over_sampled`, `version_events`, `decisions`, `task_decisions`,
`removals`. What changes afterwards is small, and says how things stand: the columns of `rollouts`
for finish, lease and consumption, those of `decisions` that say what was done about one,
`policy_versions`, and what trainers ask of drivers (`intake_requests`, `rollout_places`).
Times are seconds since the epoch, UTC.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator, TypeEngine

# The newest migration. Kept here so that opening a current store does not import Alembic.
REVISION = "0022"


class Text(TypeDecorator[str]):
    """Unicode text that every database accepts: no NUL, no lone surrogate.

    Compared by its bytes, as SQLite does, whatever language PostgreSQL's own comparisons follow:
    the same order everywhere, beginnings are found in an index, and no index depends on the
    system's collations, which change with its upgrades.
    """

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        collation = "C" if dialect.name == "postgresql" else None
        return dialect.type_descriptor(String(collation=collation))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


JsonType = JSON(none_as_null=True)
# SQLite numbers rows by itself only in a column of type INTEGER.
RowNumber = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (read by SQLAlchemy)
        str: Text(),
        float: Double(),
        int: BigInteger(),
        bytes: LargeBinary(),
        Any: JsonType,
        dict[str, Any]: JsonType,
        list[list[int]]: JsonType,
        list[str | int]: JsonType,
    }


class Rollouts(Base):
    """One row a rollout; bare (`opened` false) until its opening arrives."""

    __tablename__ = "rollouts"

    rollout_id: Mapped[str] = mapped_column(primary_key=True)
    opened: Mapped[bool]
    opened_at: Mapped[float] = mapped_column(index=True)
    task_id: Mapped[str | None]
    agent: Mapped[str | None]
    task: Mapped[Any | None]
    outcome: Mapped[str | None]
    error: Mapped[str | None]
    finished_at: Mapped[float | None]
    lease_id: Mapped[str | None]
    lease_owner: Mapped[str | None]
    leased_until: Mapped[float | None]
    consumed_at: Mapped[float | None]
    consumed_step: Mapped[int | None] = mapped_column(ForeignKey("steps.step"))
    # Null before revision 0012. `idle_s`: nobody reported its end; it was closed because so many
    # seconds had passed without a call. Null again where one came.
    idle_s: Mapped[float | None]
    # The rollout that its conversation goes on from. No foreign key: that one may be pruned.
    continues: Mapped[str | None]
    # Who opened it said that it is never to be trained; null before revision 0017.
    held_out: Mapped[bool | None]

    # Of a task that has most of a million rollouts, the newest are found without the others.
    __table_args__ = (
        Index(None, "consumed_at", "finished_at"),
        Index(None, "task_id", "opened_at"),
    )


class Outcomes(Base):
    """Every reported end of a rollout, at the time that was given for it. The first one counts,
    and is in `rollouts` with the time of its arrival. An end that was inferred (`Rollouts.idle_s`)
    is not here: nobody reported it."""

    __tablename__ = "outcomes"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"))
    outcome: Mapped[str]
    error: Mapped[str | None]
    finished_at: Mapped[float]

    # One event sent twice is one row.
    __table_args__ = (UniqueConstraint("rollout_id", "finished_at", "outcome"),)


class RolloutTags(Base):
    __tablename__ = "rollout_tags"

    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
    position: Mapped[int]  # the order they were given in

    __table_args__ = (Index(None, "key", "value", "rollout_id"),)


class Turns(Base):
    """One LLM call. `delta` holds the prompt tokens that the parent's context lacks.

    The context of a turn is prompt + completion; `context_digest` proves that a child's
    prompt begins with it, without rebuilding it. `request` is a delta to the request of the
    turn `request_base` (`encoding.request_delta`), or whole; `request_marks` let later requests
    be deltas to it, and prove it (null in rows of revision 0001).
    """

    __tablename__ = "turns"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    turn_id: Mapped[str] = mapped_column(unique=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"))
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("turns.turn_id"), index=True)
    fork_reason: Mapped[str | None]
    dialect: Mapped[str]
    model: Mapped[str]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    context_digest: Mapped[bytes]
    delta: Mapped[bytes]
    completion: Mapped[bytes]
    logprobs: Mapped[bytes]
    policy_versions: Mapped[list[list[int]]]
    last_version: Mapped[int | None]  # that sampled the last token
    sampling: Mapped[dict[str, Any]]
    finish_reason: Mapped[str | None]
    untrainable: Mapped[str | None]
    parent_span_id: Mapped[str | None]
    request: Mapped[bytes | None]
    response: Mapped[bytes | None]
    created_at: Mapped[float]
    request_base: Mapped[str | None] = mapped_column(ForeignKey("turns.turn_id"), index=True)
    request_marks: Mapped[bytes | None]
    # Null in rows from before revision 0009.
    state_key: Mapped[str | None]  # as the agent or the environment gave it
    observation: Mapped[str | None]  # digest of what was observed last
    timing: Mapped[dict[str, Any] | None]  # `events.Turn.timing`; null before revision 0013
    agent_name: Mapped[str | None]  # as the call said; null before revision 0019
    asked_model: Mapped[str | None]  # where `model` is another; null before revision 0020
    # The last column: rows that are read without it end before it (but in an SQLite file of before
    # revision 0009, where `state_key` and `observation` stand behind it, and in one that had turns
    # before revision 0013, 0019 or 0020, where `timing`, `agent_name` or `asked_model` does).
    routed_experts: Mapped[bytes | None]

    __table_args__ = (Index(None, "rollout_id", "seq"),)


class SharedTexts(Base):
    """A long text that requests or replies of several rollouts have (`encoding.shared_texts`)."""

    __tablename__ = "texts"

    digest: Mapped[bytes] = mapped_column(primary_key=True)  # of its JSON
    blob: Mapped[bytes]


class TurnTexts(Base):
    """Where a turn has a shared text: `path` begins with "request", as it is stored, or
    "response"."""

    __tablename__ = "turn_texts"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.turn_id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    path: Mapped[list[str | int]]
    digest: Mapped[bytes] = mapped_column(ForeignKey("texts.digest"), index=True)


class TaskAnchors(Base):
    """The state of a task that is sampled from a demonstration's prefixes (package `anchors`)."""

    __tablename__ = "task_anchors"

    task_id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[dict[str, Any]]
    changed_at: Mapped[float]


class RolloutKeys(Base):
    """Keys minted for a rollout, which may be known here before the rollout itself is."""

    __tablename__ = "rollout_keys"

    key_hash: Mapped[bytes] = mapped_column(primary_key=True)  # SHA-256 of the secret
    rollout_id: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    scope: Mapped[str] = mapped_column(server_default="calls")  # words with spaces between


class Rewards(Base):
    """In order of arrival (`seq`), which alone decides what counts. `source` and `created_at` are
    the proxy's own, `label`, `given_at` and `comment` the giver's; before revision 0008 all were.
    `value` is null where what was given is taken back."""

    __tablename__ = "rewards"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    reward_id: Mapped[str] = mapped_column(unique=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"), index=True)
    value: Mapped[float | None]
    name: Mapped[str]
    turn: Mapped[int | None]
    source: Mapped[str]
    created_at: Mapped[float]
    label: Mapped[str | None]
    given_at: Mapped[float | None]
    comment: Mapped[str | None]


class Scorings(Base):
    """How a scorer (a function, a command, a judge, a built-in term) ended with a rollout. Of
    several of one scorer the last round counts; earlier ones stay."""

    __tablename__ = "scorings"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"))
    scorer: Mapped[str]
    digest: Mapped[str]  # of its source, command or settings
    turns: Mapped[int]  # of the rollout, when it was scored: a later call makes it due again
    round: Mapped[int]  # 0 for the first
    state: Mapped[str]  # "scored" | "unknown" | "failed"
    attempts: Mapped[int]
    error: Mapped[str | None]
    seconds: Mapped[float]  # of all attempts, with the pauses between them
    parts: Mapped[dict[str, Any] | None]  # name -> value as it was given; null: none were
    created_at: Mapped[float]

    # Workers that score the same rollout at once: one of them writes its outcome.
    __table_args__ = (UniqueConstraint("rollout_id", "scorer", "round"),)


class Spans(Base):
    __tablename__ = "spans"

    trace_id: Mapped[str] = mapped_column(primary_key=True)
    span_id: Mapped[str] = mapped_column(primary_key=True)
    parent_span_id: Mapped[str | None]
    rollout_id: Mapped[str | None] = mapped_column(ForeignKey("rollouts.rollout_id"), index=True)
    name: Mapped[str]
    kind: Mapped[str]
    start_ns: Mapped[int]
    end_ns: Mapped[int]
    status: Mapped[str]
    attributes: Mapped[dict[str, Any]]


class Steps(Base):
    __tablename__ = "steps"

    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int]
    created_at: Mapped[float]
    settings: Mapped[dict[str, Any]]
    metrics: Mapped[dict[str, Any]]
    checkpoint: Mapped[str | None]
    batch: Mapped[dict[str, Any] | None]  # what it was made of; null before revision 0005
    # Null before revision 0007: who made it (a state folder's id), and SHA-256 of its checkpoint's
    # manifest and of that of the committed step whose weights it began with.
    run_id: Mapped[str | None]
    manifest_digest: Mapped[str | None]
    parent_digest: Mapped[str | None]


class Leases(Base):
    """Who was given which rollouts to train on, and until when.

    `released_at`: given back, or trained or skipped, before it ended by itself.
    """

    __tablename__ = "leases"

    lease_id: Mapped[str] = mapped_column(primary_key=True)
    rollout_id: Mapped[str] = mapped_column(
        ForeignKey("rollouts.rollout_id"), primary_key=True, index=True
    )
    owner: Mapped[str]
    leased_at: Mapped[float]
    leased_until: Mapped[float]
    released_at: Mapped[float | None]
    # `Rewards.seq` of the rollout's newest reward that the lease saw; null before revision 0010.
    newest_reward: Mapped[int | None]


class OverSampled(Base):
    """Attempts that a group was cut by: it was leased without them. They are not trained."""

    __tablename__ = "over_sampled"

    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"), primary_key=True)
    lease_id: Mapped[str]
    created_at: Mapped[float]


class IntakeRequests(Base):
    """How many rollouts a trainer wants to be opened (`ledger.intake`); one row a trainer, which
    renews it for as long as it lives."""

    __tablename__ = "intake_requests"

    owner: Mapped[str] = mapped_column(primary_key=True)  # as of its leases
    version: Mapped[int]  # that it serves
    wanted: Mapped[dict[str, Any]]  # `intake.IntakeRequest`, less what stands here
    stepped_at: Mapped[float | None]  # of its last step
    updated_at: Mapped[float]


class RolloutPlaces(Base):
    """Rollouts that somebody was told to open. No foreign key: they may not be open yet."""

    __tablename__ = "rollout_places"

    rollout_id: Mapped[str] = mapped_column(primary_key=True)
    granted_at: Mapped[float] = mapped_column(index=True)
    expires_at: Mapped[float]  # where it is not open by then the place is another's
    waited_s: Mapped[float]  # of who asked, its share


class TurnLedger(Base):
    """What became of a turn: trained by one step, or skipped for one reason. Never both."""

    __tablename__ = "turn_ledger"

    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.turn_id"), primary_key=True)
    step: Mapped[int | None] = mapped_column(ForeignKey("steps.step"), index=True)
    skip_reason: Mapped[str | None]
    created_at: Mapped[float]
    advantage: Mapped[float | None]  # that it was trained with; null before revision 0021

    __table_args__ = (
        CheckConstraint("(step IS NULL) <> (skip_reason IS NULL)", name="trained_or_skipped"),
    )


class PolicyVersions(Base):
    __tablename__ = "policy_versions"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int | None]
    state: Mapped[str]
    created_at: Mapped[float]
    detail: Mapped[dict[str, Any]]


class VersionEvents(Base):
    """What became of each policy version, and when; `policy_versions` has its latest state."""

    __tablename__ = "version_events"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    version: Mapped[int] = mapped_column(index=True)
    step: Mapped[int | None]
    state: Mapped[str]
    created_at: Mapped[float]
    detail: Mapped[dict[str, Any]]


class Decisions(Base):
    """What somebody decided about versions or training; `acted_at` and `outcome` are rank 0's."""

    __tablename__ = "decisions"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    kind: Mapped[str]
    version: Mapped[int | None]
    training: Mapped[str | None]
    by: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[float]
    acted_at: Mapped[float | None]
    outcome: Mapped[dict[str, Any] | None]


class TaskDecisions(Base):
    """What somebody, or a rule, decided about a task or an image; the last one counts."""

    __tablename__ = "task_decisions"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    subject: Mapped[str]  # "task" | "image"
    subject_id: Mapped[str]
    kind: Mapped[str]  # "quarantine" | "release"
    by: Mapped[str]
    reason: Mapped[str]
    evidence: Mapped[dict[str, Any] | None]  # of a rule
    created_at: Mapped[float]

    __table_args__ = (Index(None, "subject", "subject_id"),)


class Removals(Base):
    """What was taken out of the store on purpose: how much, by which rule, when."""

    __tablename__ = "removals"

    seq: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    kind: Mapped[str]  # "rollouts" | "text" | "redaction"
    created_at: Mapped[float]
    rule: Mapped[dict[str, Any]]  # as it was asked for
    removed: Mapped[dict[str, Any]]  # counts
