"""Quarantine.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "quarantine",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("call", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("at_ms", sa.Integer, nullable=False),
        sa.Column("lifted_ms", sa.Integer),
        sa.Column("epoch", sa.Integer, nullable=False),
    )
