"""Requests told by an earlier turn's; keys of rollouts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # With its reference in the column's own definition, which SQLite can add to a table in place.
    op.execute(
        "ALTER TABLE turns ADD COLUMN request_base VARCHAR "
        "CONSTRAINT fk_turns_request_base_turns REFERENCES turns (turn_id)"
    )
    op.add_column("turns", sa.Column("request_marks", sa.LargeBinary(), nullable=True))
    op.create_table(
        "rollout_keys",
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("key_hash", name=op.f("pk_rollout_keys")),
    )
    op.create_index(
        op.f("ix_rollout_keys_rollout_id"), "rollout_keys", ["rollout_id"], unique=False
    )
