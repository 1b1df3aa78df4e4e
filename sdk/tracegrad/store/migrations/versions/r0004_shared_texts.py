"""Long texts that several rollouts have, stored once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    text = sa.String(collation="C" if postgresql else None)
    op.create_table(
        "texts",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("blob", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_texts")),
    )
    op.create_table(
        "turn_texts",
        sa.Column("turn_id", text, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("path", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["turn_id"], ["turns.turn_id"], name=op.f("fk_turn_texts_turn_id_turns")
        ),
        sa.ForeignKeyConstraint(
            ["digest"], ["texts.digest"], name=op.f("fk_turn_texts_digest_texts")
        ),
        sa.PrimaryKeyConstraint("turn_id", "position", name=op.f("pk_turn_texts")),
    )
    op.create_index(op.f("ix_turn_texts_digest"), "turn_texts", ["digest"])
