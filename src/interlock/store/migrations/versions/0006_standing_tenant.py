"""Standing approvals belong to a tenant.

Those that were given before named none, and the journal does not say what they were bound to: they have to be given
again. That they were given stays in the journal.

Revision ID: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.drop_index("standing_tool", "standing")
    op.drop_table("standing")
    op.create_table(
        "standing",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("versions", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False),
        sa.Column("caller", sa.Text, nullable=False),
        sa.Column("uses", sa.Integer, nullable=False),
        sa.Column("used", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.Integer, nullable=False),
        sa.Column("expires_ms", sa.Integer, nullable=False),
        sa.Column("granted_by", sa.Text, nullable=False),
        sa.Column("revoked_ms", sa.Integer),
    )
    op.create_index("standing_tool", "standing", ["tool"])
