"""The number of bytes of stored payloads, for the home, each tenant and each caller.

The sums are kept by triggers on the payload table, so they change in the transaction that stores, expires or deletes a
payload, in every process.

Revision ID: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_ADD = (
    "INSERT INTO payload_use (scope, bytes) SELECT column1, {size}"
    " FROM (VALUES ('home'), ('tenant:' || substr({row}.owner, 1, instr({row}.owner, '/') - 1)),"
    " ('caller:' || {row}.owner)) WHERE true ON CONFLICT (scope) DO UPDATE SET bytes = bytes + excluded.bytes;"
)


def upgrade() -> None:
    op.create_table(
        "payload_use",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("bytes", sa.Integer, nullable=False),
    )
    for scope in ("'home'", "'tenant:' || substr(owner, 1, instr(owner, '/') - 1)", "'caller:' || owner"):
        op.execute(
            f"INSERT INTO payload_use (scope, bytes) SELECT {scope}, COALESCE(SUM(size), 0)"  # noqa: S608 - constant
            " FROM payload WHERE body IS NOT NULL GROUP BY 1"
        )
    op.execute(
        "CREATE TRIGGER payload_stored AFTER INSERT ON payload WHEN NEW.body IS NOT NULL BEGIN "
        + _ADD.format(row="NEW", size="NEW.size")
        + " END"
    )
    op.execute(
        "CREATE TRIGGER payload_expired AFTER UPDATE OF body ON payload"
        " WHEN OLD.body IS NOT NULL AND NEW.body IS NULL BEGIN " + _ADD.format(row="OLD", size="-OLD.size") + " END"
    )
    op.execute(
        "CREATE TRIGGER payload_deleted AFTER DELETE ON payload WHEN OLD.body IS NOT NULL BEGIN "
        + _ADD.format(row="OLD", size="-OLD.size")
        + " END"
    )
