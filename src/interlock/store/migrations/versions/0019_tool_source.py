"""The text of sandboxed tools, so that machines without their files run them.

Revision ID: 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
compatible_since = "0018"
# Every text is also in the file that it was read from.
loses = (("tool_source", "true"),)


def upgrade() -> None:
    op.create_table(
        "tool_source",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("tool_source")
