"""Authority: identities, revocations, tickets, secrets, budgets and limits.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "identity",
        sa.Column("did", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("trust", sa.Integer, nullable=False),
        sa.Column("groups", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("registered_ms", sa.Integer, nullable=False),
    )
    op.create_table(
        "revocation",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("at_ms", sa.Integer, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.UniqueConstraint("kind", "ref"),
    )
    op.create_table(
        "grant_use",
        sa.Column("jti", sa.Text, primary_key=True),
        sa.Column("used", sa.Integer, nullable=False),
    )
    op.create_table(
        "ticket",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("call", sa.Text, nullable=False),
        sa.Column("scope", sa.LargeBinary, nullable=False),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("operation", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("caller", sa.Text, nullable=False),
        sa.Column("requester", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("chain", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("preview", sa.Text, nullable=False),
        sa.Column("head", sa.Text, nullable=False),
        sa.Column("sealed", sa.LargeBinary),
        sa.Column("created_ms", sa.Integer, nullable=False),
        sa.Column("expires_ms", sa.Integer, nullable=False),
        sa.Column("resolved_ms", sa.Integer),
        sa.Column("resolved_by", sa.Text),
        sa.Column("comment", sa.Text),
        sa.Column("edited", sa.LargeBinary),
    )
    op.create_index("ticket_call", "ticket", ["call"])
    op.create_index("ticket_scope", "ticket", ["scope"])
    op.create_index("ticket_state", "ticket", ["state", "expires_ms"])
    op.create_table(
        "standing",
        sa.Column("id", sa.Text, primary_key=True),
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
    op.create_table(
        "notification",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("ticket", sa.Text, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("channel", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_ms", sa.Integer, nullable=False),
        sa.Column("owner", sa.Text),
        sa.Column("error", sa.Text),
    )
    op.create_index("notification_due", "notification", ["state", "next_ms"])
    op.create_index("notification_ticket", "notification", ["ticket"])
    op.create_table(
        "secret",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("slot", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_ms", sa.Integer, nullable=False),
        sa.Column("expires_ms", sa.Integer),
        sa.Column("resting_until_ms", sa.Integer, nullable=False),
    )
    op.create_table(
        "spend",
        sa.Column("budget", sa.Text, primary_key=True),
        sa.Column("spent", sa.Integer, nullable=False),
        sa.Column("held", sa.Integer, nullable=False),
        sa.Column("until_ms", sa.Integer),
    )
    op.create_table(
        "hold",
        sa.Column("call", sa.Text, primary_key=True),
        sa.Column("budget", sa.Text, primary_key=True),
        sa.Column("amount", sa.Integer, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
    )
    op.create_table(
        "rate",
        sa.Column("bucket", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at_ms", sa.Integer, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "suspension",
        sa.Column("service", sa.Text, primary_key=True),
        sa.Column("until_ms", sa.Integer, nullable=False),
    )
    op.create_table(
        "cost",
        sa.Column("call", sa.Text, primary_key=True),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("session", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("parts", sa.Text, nullable=False),
    )
    op.create_index("cost_task", "cost", ["task"])
