"""Rollouts that were opened to be looked at, and are never trained."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE rollouts ADD COLUMN held_out BOOLEAN")
