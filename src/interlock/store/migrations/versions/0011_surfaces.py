"""The tools that holders of a surface have loaded.

Revision ID: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "surface_tool",
        sa.Column("holder", sa.Text, primary_key=True),
        sa.Column("address", sa.Text, primary_key=True),
        sa.Column("loaded_ms", sa.Integer, nullable=False),
    )
