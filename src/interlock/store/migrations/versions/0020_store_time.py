"""The store's time in a sequence, on PostgreSQL: a row that every write changes leaves a dead one each time.

Revision ID: 0020
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
# The program before uses `interlock_begin` and the row that it changes.
compatible_since = "0019"

_ENTER = """
CREATE FUNCTION interlock_enter(instance_id text, OUT now_ms bigint, OUT xid text) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(18764, hashtext(current_schema()));
    IF instance_id <> '' AND NOT EXISTS (SELECT 1 FROM instance WHERE id = instance_id) THEN
        RAISE EXCEPTION 'the lease of this process was taken from it' USING ERRCODE = 'IL001';
    END IF;
    now_ms := setval('store_time', greatest((SELECT last_value FROM store_time), (SELECT ms FROM store_clock),
        floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint));
    xid := pg_current_xact_id()::text;
END $$
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("CREATE SEQUENCE store_time")
        op.get_bind().exec_driver_sql(_ENTER)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("UPDATE store_clock SET ms = greatest(ms, (SELECT last_value FROM store_time))")
        op.execute("DROP FUNCTION interlock_enter(text)")
        op.execute("DROP SEQUENCE store_time")
