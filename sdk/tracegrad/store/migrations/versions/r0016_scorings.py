"""How scorers (functions, commands, judges) ended with rollouts."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_SQLITE = """
CREATE TABLE scorings (
    seq INTEGER NOT NULL,
    rollout_id VARCHAR NOT NULL,
    scorer VARCHAR NOT NULL,
    digest VARCHAR NOT NULL,
    turns BIGINT NOT NULL,
    round BIGINT NOT NULL,
    state VARCHAR NOT NULL,
    attempts BIGINT NOT NULL,
    error VARCHAR,
    seconds DOUBLE NOT NULL,
    parts JSON,
    created_at DOUBLE NOT NULL,
    CONSTRAINT pk_scorings PRIMARY KEY (seq),
    CONSTRAINT fk_scorings_rollout_id_rollouts FOREIGN KEY(rollout_id)
        REFERENCES rollouts (rollout_id),
    CONSTRAINT uq_scorings_rollout_id_scorer_round UNIQUE (rollout_id, scorer, round)
)
"""
_POSTGRESQL = """
CREATE TABLE scorings (
    seq BIGSERIAL NOT NULL,
    rollout_id VARCHAR COLLATE "C" NOT NULL,
    scorer VARCHAR COLLATE "C" NOT NULL,
    digest VARCHAR COLLATE "C" NOT NULL,
    turns BIGINT NOT NULL,
    round BIGINT NOT NULL,
    state VARCHAR COLLATE "C" NOT NULL,
    attempts BIGINT NOT NULL,
    error VARCHAR COLLATE "C",
    seconds DOUBLE PRECISION NOT NULL,
    parts JSON,
    created_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_scorings PRIMARY KEY (seq),
    CONSTRAINT fk_scorings_rollout_id_rollouts FOREIGN KEY(rollout_id)
        REFERENCES rollouts (rollout_id),
    CONSTRAINT uq_scorings_rollout_id_scorer_round UNIQUE (rollout_id, scorer, round)
)
"""


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    op.execute(_SQLITE if sqlite else _POSTGRESQL)
