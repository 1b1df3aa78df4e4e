"""Turns say which of a rollout's agents made the call."""

from __future__ import annotations

from alembic import op

from tracegrad.store.migrations.versions.r0013_turn_timing import experts_last

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    text = 'VARCHAR COLLATE "C"' if op.get_bind().dialect.name == "postgresql" else "VARCHAR"
    op.execute(f"ALTER TABLE turns ADD COLUMN agent_name {text}")
    experts_last()
