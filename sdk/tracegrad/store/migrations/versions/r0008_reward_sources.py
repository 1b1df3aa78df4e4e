"""Rewards say who gave them; rollout keys say what they are for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    text = sa.String(collation="C" if op.get_bind().dialect.name == "postgresql" else None)
    op.add_column("rewards", sa.Column("label", text, nullable=True))
    op.add_column("rewards", sa.Column("given_at", sa.Double(), nullable=True))
    # So far whoever gave a reward said who they were, and when: both are kept as what they said.
    op.execute("UPDATE rewards SET label = source, given_at = created_at, source = 'claimed'")
    # A key of the time before calls models, as one does that an agent is given.
    op.add_column("rollout_keys", sa.Column("scope", text, nullable=False, server_default="calls"))
