"""Large payloads in pieces, each of which is written in a transaction of its own.

Revision ID: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "payload_piece",
        sa.Column("ref", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.add_column("payload", sa.Column("pieces", sa.Integer, nullable=False, server_default="0"))
    op.create_index("payload_in_pieces", "payload", ["ref"], sqlite_where=sa.text("pieces > 0"))
