"""All tables of revision 0009, the first that was released.

The statements are frozen: what changes later is a revision of its own.
"""

from __future__ import annotations

import re

from alembic import op

revision = "0009"
down_revision = None
branch_labels = None
depends_on = None

_STATEMENTS = """
CREATE TABLE policy_versions (
    version BIGINT NOT NULL, step BIGINT, state VARCHAR NOT NULL, created_at DOUBLE NOT NULL,
    detail JSON NOT NULL,
    CONSTRAINT pk_policy_versions PRIMARY KEY (version)
);
CREATE TABLE steps (
    step BIGINT NOT NULL, version BIGINT NOT NULL, created_at DOUBLE NOT NULL,
    settings JSON NOT NULL, metrics JSON NOT NULL, checkpoint VARCHAR, batch JSON, run_id VARCHAR,
    manifest_digest VARCHAR, parent_digest VARCHAR,
    CONSTRAINT pk_steps PRIMARY KEY (step)
);
CREATE TABLE rollouts (
    rollout_id VARCHAR NOT NULL, opened BOOLEAN NOT NULL, opened_at DOUBLE NOT NULL,
    task_id VARCHAR, agent VARCHAR, task JSON, outcome VARCHAR, error VARCHAR, finished_at DOUBLE,
    lease_id VARCHAR, lease_owner VARCHAR, leased_until DOUBLE, consumed_at DOUBLE,
    consumed_step BIGINT,
    CONSTRAINT pk_rollouts PRIMARY KEY (rollout_id),
    CONSTRAINT fk_rollouts_consumed_step_steps FOREIGN KEY (consumed_step) REFERENCES steps (step)
);
CREATE INDEX ix_rollouts_consumed_at_finished_at ON rollouts (consumed_at, finished_at);
CREATE INDEX ix_rollouts_opened_at ON rollouts (opened_at);
CREATE INDEX ix_rollouts_task_id ON rollouts (task_id);
CREATE TABLE rewards (
    seq SERIAL NOT NULL, reward_id VARCHAR NOT NULL, rollout_id VARCHAR NOT NULL,
    value DOUBLE NOT NULL, name VARCHAR NOT NULL, turn BIGINT, source VARCHAR NOT NULL,
    created_at DOUBLE NOT NULL, label VARCHAR, given_at DOUBLE,
    CONSTRAINT pk_rewards PRIMARY KEY (seq),
    CONSTRAINT fk_rewards_rollout_id_rollouts
        FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id),
    CONSTRAINT uq_rewards_reward_id UNIQUE (reward_id)
);
CREATE INDEX ix_rewards_rollout_id ON rewards (rollout_id);
CREATE TABLE rollout_tags (
    rollout_id VARCHAR NOT NULL, key VARCHAR NOT NULL, value VARCHAR NOT NULL,
    position BIGINT NOT NULL,
    CONSTRAINT pk_rollout_tags PRIMARY KEY (rollout_id, key),
    CONSTRAINT fk_rollout_tags_rollout_id_rollouts
        FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id)
);
CREATE INDEX ix_rollout_tags_key_value_rollout_id ON rollout_tags (key, value, rollout_id);
CREATE TABLE spans (
    trace_id VARCHAR NOT NULL, span_id VARCHAR NOT NULL, parent_span_id VARCHAR,
    rollout_id VARCHAR, name VARCHAR NOT NULL, kind VARCHAR NOT NULL, start_ns BIGINT NOT NULL,
    end_ns BIGINT NOT NULL, status VARCHAR NOT NULL, attributes JSON NOT NULL,
    CONSTRAINT pk_spans PRIMARY KEY (trace_id, span_id),
    CONSTRAINT fk_spans_rollout_id_rollouts
        FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id)
);
CREATE INDEX ix_spans_rollout_id ON spans (rollout_id);
CREATE TABLE turns (
    seq SERIAL NOT NULL, turn_id VARCHAR NOT NULL, rollout_id VARCHAR NOT NULL,
    parent_id VARCHAR, fork_reason VARCHAR, dialect VARCHAR NOT NULL, model VARCHAR NOT NULL,
    prompt_tokens BIGINT NOT NULL, completion_tokens BIGINT NOT NULL,
    context_digest BLOB NOT NULL, delta BLOB NOT NULL, completion BLOB NOT NULL,
    logprobs BLOB NOT NULL, policy_versions JSON NOT NULL, last_version BIGINT,
    sampling JSON NOT NULL, finish_reason VARCHAR, untrainable VARCHAR, parent_span_id VARCHAR,
    request BLOB, response BLOB, created_at DOUBLE NOT NULL, request_base VARCHAR,
    request_marks BLOB, state_key VARCHAR, observation VARCHAR,
    -- SQLite reads a row from its beginning: nothing stands behind these megabytes.
    routed_experts BLOB,
    CONSTRAINT pk_turns PRIMARY KEY (seq),
    CONSTRAINT fk_turns_parent_id_turns FOREIGN KEY (parent_id) REFERENCES turns (turn_id),
    CONSTRAINT fk_turns_request_base_turns FOREIGN KEY (request_base) REFERENCES turns (turn_id),
    CONSTRAINT fk_turns_rollout_id_rollouts
        FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id),
    CONSTRAINT uq_turns_turn_id UNIQUE (turn_id)
);
CREATE INDEX ix_turns_rollout_id_seq ON turns (rollout_id, seq);
CREATE INDEX ix_turns_parent_id ON turns (parent_id);
CREATE INDEX ix_turns_request_base ON turns (request_base);
CREATE TABLE turn_ledger (
    turn_id VARCHAR NOT NULL, step BIGINT, skip_reason VARCHAR, created_at DOUBLE NOT NULL,
    CONSTRAINT pk_turn_ledger PRIMARY KEY (turn_id),
    CONSTRAINT ck_turn_ledger_trained_or_skipped
        CHECK ((step IS NULL) <> (skip_reason IS NULL)),
    CONSTRAINT fk_turn_ledger_step_steps FOREIGN KEY (step) REFERENCES steps (step),
    CONSTRAINT fk_turn_ledger_turn_id_turns FOREIGN KEY (turn_id) REFERENCES turns (turn_id)
);
CREATE INDEX ix_turn_ledger_step ON turn_ledger (step);
CREATE TABLE rollout_keys (
    key_hash BLOB NOT NULL, rollout_id VARCHAR NOT NULL, created_at DOUBLE NOT NULL,
    revoked_at DOUBLE, scope VARCHAR DEFAULT 'calls' NOT NULL,
    CONSTRAINT pk_rollout_keys PRIMARY KEY (key_hash)
);
CREATE INDEX ix_rollout_keys_rollout_id ON rollout_keys (rollout_id);
CREATE TABLE outcomes (
    seq SERIAL NOT NULL, rollout_id VARCHAR NOT NULL, outcome VARCHAR NOT NULL, error VARCHAR,
    finished_at DOUBLE NOT NULL,
    CONSTRAINT pk_outcomes PRIMARY KEY (seq),
    CONSTRAINT fk_outcomes_rollout_id_rollouts
        FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id),
    CONSTRAINT uq_outcomes_rollout_id_finished_at_outcome
        UNIQUE (rollout_id, finished_at, outcome)
);
CREATE TABLE leases (
    lease_id VARCHAR NOT NULL, rollout_id VARCHAR NOT NULL, owner VARCHAR NOT NULL,
    leased_at DOUBLE NOT NULL, leased_until DOUBLE NOT NULL, released_at DOUBLE,
    CONSTRAINT pk_leases PRIMARY KEY (lease_id, rollout_id),
    CONSTRAINT fk_leases_rollout_id_rollouts
        FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id)
);
CREATE INDEX ix_leases_rollout_id ON leases (rollout_id);
CREATE TABLE version_events (
    seq SERIAL NOT NULL, version BIGINT NOT NULL, step BIGINT, state VARCHAR NOT NULL,
    created_at DOUBLE NOT NULL, detail JSON NOT NULL,
    CONSTRAINT pk_version_events PRIMARY KEY (seq)
);
CREATE INDEX ix_version_events_version ON version_events (version);
CREATE TABLE removals (
    seq SERIAL NOT NULL, kind VARCHAR NOT NULL, created_at DOUBLE NOT NULL, rule JSON NOT NULL,
    removed JSON NOT NULL,
    CONSTRAINT pk_removals PRIMARY KEY (seq)
);
CREATE TABLE texts (
    digest BLOB NOT NULL, blob BLOB NOT NULL,
    CONSTRAINT pk_texts PRIMARY KEY (digest)
);
CREATE TABLE turn_texts (
    turn_id VARCHAR NOT NULL, position BIGINT NOT NULL, path JSON NOT NULL, digest BLOB NOT NULL,
    CONSTRAINT pk_turn_texts PRIMARY KEY (turn_id, position),
    CONSTRAINT fk_turn_texts_turn_id_turns FOREIGN KEY (turn_id) REFERENCES turns (turn_id),
    CONSTRAINT fk_turn_texts_digest_texts FOREIGN KEY (digest) REFERENCES texts (digest)
);
CREATE INDEX ix_turn_texts_digest ON turn_texts (digest);
CREATE TABLE task_anchors (
    task_id VARCHAR NOT NULL, state JSON NOT NULL, changed_at DOUBLE NOT NULL,
    CONSTRAINT pk_task_anchors PRIMARY KEY (task_id)
)
"""
# Text is compared by its bytes in both databases (`models.Text`).
_TYPES = {
    "sqlite": {"SERIAL": "INTEGER"},
    "postgresql": {
        "SERIAL": "BIGSERIAL",
        "VARCHAR": 'VARCHAR COLLATE "C"',
        "DOUBLE": "DOUBLE PRECISION",
        "BLOB": "BYTEA",
    },
}


def upgrade() -> None:
    types = _TYPES[op.get_bind().dialect.name]
    statements = re.sub(r"\b[A-Z]+\b", lambda word: types.get(word[0], word[0]), _STATEMENTS)
    for statement in statements.split(";"):
        op.execute(statement)
