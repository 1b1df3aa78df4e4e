"""Turns say which model their client asked for, where another name answered."""

from __future__ import annotations

from alembic import op

from tracegrad.store.migrations.versions.r0013_turn_timing import experts_last

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    text = 'VARCHAR COLLATE "C"' if op.get_bind().dialect.name == "postgresql" else "VARCHAR"
    op.execute(f"ALTER TABLE turns ADD COLUMN asked_model {text}")
    experts_last()
