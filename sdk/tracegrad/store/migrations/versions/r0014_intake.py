"""Trainers say how many rollouts they want, drivers hold places, groups are cut."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_SQLITE = """
CREATE TABLE intake_requests (
    owner VARCHAR NOT NULL,
    version BIGINT NOT NULL,
    wanted JSON NOT NULL,
    stepped_at DOUBLE,
    updated_at DOUBLE NOT NULL,
    CONSTRAINT pk_intake_requests PRIMARY KEY (owner)
);
CREATE TABLE rollout_places (
    rollout_id VARCHAR NOT NULL,
    granted_at DOUBLE NOT NULL,
    expires_at DOUBLE NOT NULL,
    waited_s DOUBLE NOT NULL,
    CONSTRAINT pk_rollout_places PRIMARY KEY (rollout_id)
);
CREATE INDEX ix_rollout_places_granted_at ON rollout_places (granted_at);
CREATE TABLE over_sampled (
    rollout_id VARCHAR NOT NULL,
    lease_id VARCHAR NOT NULL,
    created_at DOUBLE NOT NULL,
    CONSTRAINT pk_over_sampled PRIMARY KEY (rollout_id),
    CONSTRAINT fk_over_sampled_rollout_id_rollouts
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
)
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        statements = _SQLITE
    else:
        statements = _SQLITE.replace("VARCHAR", 'VARCHAR COLLATE "C"')
        statements = statements.replace("DOUBLE", "DOUBLE PRECISION")
    for statement in statements.split(";"):
        op.execute(statement)
