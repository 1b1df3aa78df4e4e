"""Decisions about policy versions: promoted, rolled back to, pinned; training paused."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# "by" is a keyword of SQLite's.
_TABLE = """
CREATE TABLE decisions (
    seq {serial} NOT NULL, kind {text} NOT NULL, version BIGINT, training {text},
    "by" {text} NOT NULL, reason {text} NOT NULL, created_at {double} NOT NULL,
    acted_at {double}, outcome JSON,
    CONSTRAINT pk_decisions PRIMARY KEY (seq)
)
"""
_TYPES = {
    "sqlite": {"serial": "INTEGER", "text": "VARCHAR", "double": "DOUBLE"},
    "postgresql": {
        "serial": "BIGSERIAL",
        "text": 'VARCHAR COLLATE "C"',
        "double": "DOUBLE PRECISION",
    },
}


def upgrade() -> None:
    op.execute(_TABLE.format_map(_TYPES[op.get_bind().dialect.name]))
