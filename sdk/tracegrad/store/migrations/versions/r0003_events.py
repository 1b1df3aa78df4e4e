"""Ends, leases and versions as events; what was removed; indexes for taking turns out."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TABLES = (
    *("policy_versions", "steps", "rollouts", "rewards", "rollout_tags", "spans", "turns"),
    *("turn_ledger", "rollout_keys", "outcomes", "leases", "version_events", "removals"),
)


def upgrade() -> None:
    op.create_table(
        "outcomes",
        sa.Column("seq", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_outcomes_rollout_id_rollouts")
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_outcomes")),
        sa.UniqueConstraint(
            "rollout_id",
            "finished_at",
            "outcome",
            name=op.f("uq_outcomes_rollout_id_finished_at_outcome"),
        ),
    )
    op.execute(
        "INSERT INTO outcomes (rollout_id, outcome, error, finished_at) "
        "SELECT rollout_id, outcome, error, finished_at FROM rollouts "
        "WHERE finished_at IS NOT NULL ORDER BY finished_at, rollout_id"
    )
    op.create_table(
        "leases",
        sa.Column("lease_id", sa.String(), nullable=False),
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("leased_at", sa.Double(), nullable=False),
        sa.Column("leased_until", sa.Double(), nullable=False),
        sa.Column("released_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_leases_rollout_id_rollouts")
        ),
        sa.PrimaryKeyConstraint("lease_id", "rollout_id", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_rollout_id"), "leases", ["rollout_id"])
    op.create_table(
        "version_events",
        sa.Column("seq", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("detail", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_version_events")),
    )
    op.create_index(op.f("ix_version_events_version"), "version_events", ["version"])
    op.execute(
        "INSERT INTO version_events (version, step, state, created_at, detail) "
        "SELECT version, step, state, created_at, detail FROM policy_versions ORDER BY version"
    )
    op.create_table(
        "removals",
        sa.Column("seq", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("rule", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("removed", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_removals")),
    )
    op.create_index(op.f("ix_turns_parent_id"), "turns", ["parent_id"])
    op.create_index(op.f("ix_turns_request_base"), "turns", ["request_base"])
    if op.get_bind().dialect.name == "postgresql":
        _compare_by_bytes()


def _compare_by_bytes() -> None:
    inspector = sa.inspect(op.get_bind())
    for table in _TABLES:
        texts = [
            c["name"] for c in inspector.get_columns(table) if isinstance(c["type"], sa.String)
        ]
        changes = ", ".join(f'ALTER COLUMN {name} TYPE VARCHAR COLLATE "C"' for name in texts)
        if changes:
            op.execute(f"ALTER TABLE {table} {changes}")
