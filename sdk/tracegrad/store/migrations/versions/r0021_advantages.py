"""Trained turns say with which advantage."""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    number = "DOUBLE PRECISION" if op.get_bind().dialect.name == "postgresql" else "DOUBLE"
    op.execute(f"ALTER TABLE turn_ledger ADD COLUMN advantage {number}")
