"""A task's rollouts are found in the order in which they were opened."""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE INDEX ix_rollouts_task_id_opened_at ON rollouts (task_id, opened_at)")
    # What it was asked for the other one begins with, too.
    op.execute("DROP INDEX ix_rollouts_task_id")
