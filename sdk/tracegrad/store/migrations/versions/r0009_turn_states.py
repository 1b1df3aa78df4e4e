"""Turns carry their environment's state; tasks, where they stand in an expert's trajectory."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    text = sa.String(collation="C" if postgresql else None)
    op.add_column("turns", sa.Column("state_key", text, nullable=True))
    op.add_column("turns", sa.Column("observation", text, nullable=True))
    _routes_last()
    op.create_table(
        "task_anchors",
        sa.Column("task_id", text, nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_task_anchors")),
    )


def _routes_last() -> None:
    """A row of SQLite is read from its beginning: what stands behind routed experts, megabytes,
    costs them. Where there are turns already the whole file would be written anew."""
    connection = op.get_bind()
    version = connection.dialect.server_version_info or ()
    if connection.dialect.name != "sqlite" or version < (3, 35):
        return
    if connection.scalar(sa.text("SELECT 1 FROM turns LIMIT 1")) is None:
        op.drop_column("turns", "routed_experts")
        op.add_column("turns", sa.Column("routed_experts", sa.LargeBinary(), nullable=True))
