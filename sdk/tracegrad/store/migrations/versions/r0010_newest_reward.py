"""Leases note the newest reward that they saw: what arrived later is told by its number."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE leases ADD COLUMN newest_reward BIGINT")
