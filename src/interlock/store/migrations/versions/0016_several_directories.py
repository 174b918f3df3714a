"""Processes of several data directories may use one store on PostgreSQL at the same time.

Revision ID: 0016
"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"

_RENEW = """
CREATE OR REPLACE FUNCTION interlock_renew(instance_id text, told bytea, anew boolean, directory text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE until bigint := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + 15000;
BEGIN
    IF anew THEN{alone}
        INSERT INTO instance (id, until_ms, report, place) VALUES (instance_id, until, told, directory);
    ELSE
        UPDATE instance SET until_ms = until, report = told WHERE id = instance_id;
    END IF;
    RETURN FOUND;
END $$
"""
_ALONE = """
CREATE FUNCTION interlock_alone(directory text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE now bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(18766, hashtext(current_schema()));
    now := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    IF EXISTS (SELECT 1 FROM instance WHERE place <> directory AND until_ms >= now) THEN
        RAISE EXCEPTION 'another data directory uses this store' USING ERRCODE = 'IL002';
    END IF;
    DELETE FROM instance WHERE place <> directory;  -- they may not write again, should they still be there
END $$
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.get_bind().exec_driver_sql(_RENEW.format(alone=""))
        op.get_bind().exec_driver_sql("DROP FUNCTION interlock_alone(text)")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.get_bind().exec_driver_sql(_ALONE)
        op.get_bind().exec_driver_sql(_RENEW.format(alone="\n        PERFORM interlock_alone(directory);"))
