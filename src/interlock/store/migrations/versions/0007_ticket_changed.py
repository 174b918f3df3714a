"""A ticket keeps what its reviewer made of the input, and what they were shown that this would do.

Revision ID: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("ticket", sa.Column("changed", sa.Text))
