"""The board of resource locks, on PostgreSQL. On SQLite it is a file of the data directory.

Revision ID: 0015
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0012"

_BOARD = """
CREATE FUNCTION interlock_board(me text, OUT version bigint, OUT document bytea, OUT living text) LANGUAGE plpgsql AS $$
BEGIN
    SELECT b.version, b.document INTO version, document FROM lock_board b FOR UPDATE;
    DELETE FROM instance WHERE id <> me
        AND until_ms < floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        AND pg_postmaster_start_time() < clock_timestamp() - interval '15000 milliseconds';
    IF NOT EXISTS (SELECT 1 FROM instance WHERE id = me) THEN
        RAISE EXCEPTION 'the lease of this process was taken from it' USING ERRCODE = 'IL001';
    END IF;
    SELECT coalesce(string_agg(id, ' '), '') INTO living FROM instance;
END $$
"""


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for statement in (
        "CREATE TABLE lock_board (version BIGINT NOT NULL, document BYTEA NOT NULL)",
        "CREATE UNIQUE INDEX lock_board_once ON lock_board ((true))",
        """INSERT INTO lock_board (version, document) VALUES (0, convert_to('{"next":1,"members":{}}', 'UTF8'))""",
        _BOARD,
    ):
        op.get_bind().exec_driver_sql(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION interlock_board(text)")
        op.drop_table("lock_board")
