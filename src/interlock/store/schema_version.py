"""The version of the schema of a database, and whether this program can work on it."""

from __future__ import annotations

from interlock.core.errors import Failure
from interlock.store.port import Reader

SCHEMA_HEAD = "0020"
APPLICATION_ID = 0x494C434B  # "ILCK": distinguishes our database from others


def refuse_running(count: int, schema: str, target: str) -> None:
    """Refuse (E3804) to change the schema under so many processes."""
    if count == 0:
        return
    runs, them = ("1 process runs", "it") if count == 1 else (f"{count} processes run", "them")
    raise Failure(
        "E3804",
        f"{runs} on this data directory, and this version would change its database under {them}:"
        f" schema {schema} to {target}",
        resolution=f"stop {them} (the server, whatever watches), make a backup, then run this again",
    )


# The fact that names the oldest schema whose program can work on a database. Migrations write it.
COMPATIBLE_SINCE = "schema_compatible_since"


def schema_of(reader: Reader) -> str | None:
    """The schema that a database is at; None where nobody has made one."""
    row = reader.one("SELECT version_num FROM alembic_version")
    return None if row is None else row[0]


def is_known(reader: Reader) -> bool:
    """Whether this program can work on a database: it is at the schema of the program, or at a newer one that says so.

    Refuses (E3805) any other newer schema. An older one has to be migrated first.
    """
    schema = schema_of(reader)
    if schema is None or schema <= SCHEMA_HEAD:
        return schema == SCHEMA_HEAD
    row = reader.one("SELECT value FROM fact WHERE name = ?", (COMPATIBLE_SINCE,))
    if row is None or row[0] > SCHEMA_HEAD:
        raise Failure("E3805", f"the store has schema {schema}; this program knows up to {SCHEMA_HEAD}")
    return True


def refuse_changed(reader: Reader) -> None:
    """Refuse a store whose schema was changed since this program found it to be one that it can work on.

    A newer one that it cannot work on is refused with E3805, an older one, whose last migration was undone, with E3804.
    """
    if not is_known(reader):
        raise Failure(
            "E3804",
            "the schema of the store was changed while this process opened it: its last migration was undone",
            resolution="run the version before, or run this again to apply the migration anew",
        )
