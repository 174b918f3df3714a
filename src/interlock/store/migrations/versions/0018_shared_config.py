"""The configuration that all machines on a store share.

Revision ID: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0016"
compatible_since = "0016"
loses = (("shared_config", "true"),)


def upgrade() -> None:
    op.create_table(
        "shared_config",
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("files", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("pushed_by", sa.Text, nullable=False),
        sa.Column("at_ms", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("shared_config")
