"""Upstreams, what they offer, and the breakers of services.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "upstream",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("overlay", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("added_ms", sa.Integer, nullable=False),
        sa.Column("added_by", sa.Text, nullable=False),
        sa.Column("discovered_ms", sa.Integer, nullable=False),
        sa.Column("probed_ms", sa.Integer, nullable=False),
    )
    op.create_table(
        "upstream_tool",
        sa.Column("upstream", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("version", sa.Text),
        sa.Column("pinned", sa.Text),
        sa.Column("seen", sa.Text, nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("discovered_ms", sa.Integer, nullable=False),
    )
    op.create_table(
        "breaker",
        sa.Column("service", sa.Text, primary_key=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("since_ms", sa.Integer, nullable=False),
        sa.Column("until_ms", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
