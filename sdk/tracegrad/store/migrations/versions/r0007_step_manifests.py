"""Steps name their run and the digest of their checkpoint's manifest."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    postgresql = op.get_context().dialect.name == "postgresql"
    text = sa.String(collation="C" if postgresql else None)
    for name in ("run_id", "manifest_digest", "parent_digest"):
        op.add_column("steps", sa.Column(name, text, nullable=True))
