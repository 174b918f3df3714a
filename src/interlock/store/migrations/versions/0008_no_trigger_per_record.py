"""Records are written without a trigger that looks at each: the connection refuses to replace one.

Revision ID: 0008
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.execute("DROP TRIGGER IF EXISTS journal_only_grows")
