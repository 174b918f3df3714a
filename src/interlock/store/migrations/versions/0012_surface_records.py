"""Surfaces themselves, with their revision and what they offer; when a loaded tool was last used.

Revision ID: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
loses = (("surface", "true"), ("surface_tool.used_ms", "used_ms IS NOT NULL"))


def upgrade() -> None:
    op.add_column("surface_tool", sa.Column("used_ms", sa.Integer))
    op.create_table(
        "surface",
        sa.Column("holder", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("caller", sa.Text, nullable=False),
        sa.Column("agent", sa.Text),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("offered", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.Integer, nullable=False),
        sa.Column("changed_ms", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("surface")
    op.drop_column("surface_tool", "used_ms")
