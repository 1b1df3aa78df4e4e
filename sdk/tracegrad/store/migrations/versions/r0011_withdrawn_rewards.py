"""A reward may be taken back (its value is null), and say why it was given."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# SQLite cannot change a column: the rows are copied.
_SQLITE = """
CREATE TABLE rewards_0011 (
    seq INTEGER NOT NULL, reward_id VARCHAR NOT NULL, rollout_id VARCHAR NOT NULL,
    value DOUBLE, name VARCHAR NOT NULL, turn BIGINT, source VARCHAR NOT NULL,
    created_at DOUBLE NOT NULL, label VARCHAR, given_at DOUBLE, comment VARCHAR,
    CONSTRAINT pk_rewards PRIMARY KEY (seq),
    CONSTRAINT fk_rewards_rollout_id_rollouts
        FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id),
    CONSTRAINT uq_rewards_reward_id UNIQUE (reward_id)
);
INSERT INTO rewards_0011
    SELECT seq, reward_id, rollout_id, value, name, turn, source, created_at, label, given_at, NULL
    FROM rewards;
DROP TABLE rewards;
ALTER TABLE rewards_0011 RENAME TO rewards;
CREATE INDEX ix_rewards_rollout_id ON rewards (rollout_id)
"""
_POSTGRESQL = """
ALTER TABLE rewards ALTER COLUMN value DROP NOT NULL;
ALTER TABLE rewards ADD COLUMN comment VARCHAR COLLATE "C"
"""


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in (_SQLITE if sqlite else _POSTGRESQL).split(";"):
        op.execute(statement)
