"""Decisions about tasks and images: quarantined, released."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

# "by" is a keyword of SQLite's.
_TABLE = """
CREATE TABLE task_decisions (
    seq {serial} NOT NULL, subject {text} NOT NULL, subject_id {text} NOT NULL,
    kind {text} NOT NULL, "by" {text} NOT NULL, reason {text} NOT NULL, evidence JSON,
    created_at {double} NOT NULL,
    CONSTRAINT pk_task_decisions PRIMARY KEY (seq)
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
    op.execute(
        "CREATE INDEX ix_task_decisions_subject_subject_id ON task_decisions (subject, subject_id)"
    )
