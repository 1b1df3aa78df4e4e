"""What a step was made of, so that it can be run again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("steps", sa.Column("batch", sa.JSON(none_as_null=True), nullable=True))
