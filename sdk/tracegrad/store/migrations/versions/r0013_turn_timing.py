"""Turns say where the seconds of their calls went."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE turns ADD COLUMN timing JSON")
    experts_last()


def experts_last() -> None:
    """A row of SQLite is read from its beginning: what stands behind routed experts, megabytes,
    costs them. Where there are turns already the whole file would be written anew."""
    connection = op.get_bind()
    version = connection.dialect.server_version_info or ()
    if connection.dialect.name != "sqlite" or version < (3, 35):
        return
    if connection.scalar(sa.text("SELECT 1 FROM turns LIMIT 1")) is None:
        op.execute("ALTER TABLE turns DROP COLUMN routed_experts")
        op.execute("ALTER TABLE turns ADD COLUMN routed_experts BLOB")
