"""Rollouts that nobody opened are closed after a time without a call, and go on in others."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_SQLITE = """
ALTER TABLE rollouts ADD COLUMN idle_s DOUBLE;
ALTER TABLE rollouts ADD COLUMN continues VARCHAR
"""
_POSTGRESQL = """
ALTER TABLE rollouts ADD COLUMN idle_s DOUBLE PRECISION;
ALTER TABLE rollouts ADD COLUMN continues VARCHAR COLLATE "C"
"""


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in (_SQLITE if sqlite else _POSTGRESQL).split(";"):
        op.execute(statement)
