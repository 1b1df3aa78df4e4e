"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("detail", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_policy_versions")),
    )
    op.create_table(
        "steps",
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("settings", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("checkpoint", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("step", name=op.f("pk_steps")),
    )
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("opened", sa.Boolean(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=True),
        sa.Column("agent", sa.String(), nullable=True),
        sa.Column("task", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("lease_id", sa.String(), nullable=True),
        sa.Column("lease_owner", sa.String(), nullable=True),
        sa.Column("leased_until", sa.Double(), nullable=True),
        sa.Column("consumed_at", sa.Double(), nullable=True),
        sa.Column("consumed_step", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["consumed_step"], ["steps.step"], name=op.f("fk_rollouts_consumed_step_steps")
        ),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rollouts")),
    )
    op.create_index(
        op.f("ix_rollouts_consumed_at_finished_at"),
        "rollouts",
        ["consumed_at", "finished_at"],
        unique=False,
    )
    op.create_index(op.f("ix_rollouts_opened_at"), "rollouts", ["opened_at"], unique=False)
    op.create_index(op.f("ix_rollouts_task_id"), "rollouts", ["task_id"], unique=False)
    op.create_table(
        "rewards",
        sa.Column(
            "seq",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("reward_id", sa.String(), nullable=False),
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=True),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_rewards_rollout_id_rollouts")
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_rewards")),
        sa.UniqueConstraint("reward_id", name=op.f("uq_rewards_reward_id")),
    )
    op.create_index(op.f("ix_rewards_rollout_id"), "rewards", ["rollout_id"], unique=False)
    op.create_table(
        "rollout_tags",
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["rollouts.rollout_id"],
            name=op.f("fk_rollout_tags_rollout_id_rollouts"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "key", name=op.f("pk_rollout_tags")),
    )
    op.create_index(
        op.f("ix_rollout_tags_key_value_rollout_id"),
        "rollout_tags",
        ["key", "value", "rollout_id"],
        unique=False,
    )
    op.create_table(
        "spans",
        sa.Column("trace_id", sa.String(), nullable=False),
        sa.Column("span_id", sa.String(), nullable=False),
        sa.Column("parent_span_id", sa.String(), nullable=True),
        sa.Column("rollout_id", sa.String(), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("start_ns", sa.BigInteger(), nullable=False),
        sa.Column("end_ns", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("attributes", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_spans_rollout_id_rollouts")
        ),
        sa.PrimaryKeyConstraint("trace_id", "span_id", name=op.f("pk_spans")),
    )
    op.create_index(op.f("ix_spans_rollout_id"), "spans", ["rollout_id"], unique=False)
    op.create_table(
        "turns",
        sa.Column(
            "seq",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("turn_id", sa.String(), nullable=False),
        sa.Column("rollout_id", sa.String(), nullable=False),
        sa.Column("parent_id", sa.String(), nullable=True),
        sa.Column("fork_reason", sa.String(), nullable=True),
        sa.Column("dialect", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("context_digest", sa.LargeBinary(), nullable=False),
        sa.Column("delta", sa.LargeBinary(), nullable=False),
        sa.Column("completion", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("policy_versions", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("last_version", sa.BigInteger(), nullable=True),
        sa.Column("sampling", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("untrainable", sa.String(), nullable=True),
        sa.Column("parent_span_id", sa.String(), nullable=True),
        sa.Column("request", sa.LargeBinary(), nullable=True),
        sa.Column("response", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["parent_id"], ["turns.turn_id"], name=op.f("fk_turns_parent_id_turns")
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_turns_rollout_id_rollouts")
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_turns")),
        sa.UniqueConstraint("turn_id", name=op.f("uq_turns_turn_id")),
    )
    op.create_index(op.f("ix_turns_rollout_id_seq"), "turns", ["rollout_id", "seq"], unique=False)
    op.create_table(
        "turn_ledger",
        sa.Column("turn_id", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("skip_reason", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "(step IS NULL) <> (skip_reason IS NULL)",
            name=op.f("ck_turn_ledger_trained_or_skipped"),
        ),
        sa.ForeignKeyConstraint(["step"], ["steps.step"], name=op.f("fk_turn_ledger_step_steps")),
        sa.ForeignKeyConstraint(
            ["turn_id"], ["turns.turn_id"], name=op.f("fk_turn_ledger_turn_id_turns")
        ),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("pk_turn_ledger")),
    )
    op.create_index(op.f("ix_turn_ledger_step"), "turn_ledger", ["step"], unique=False)
