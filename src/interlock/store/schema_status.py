"""The state of the schema of a database, and what this program has to do about it."""

from __future__ import annotations

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.store.home import Home
from interlock.store.inspection import opened
from interlock.store.migration_list import Migration, at_stake, last_applied, pending_at
from interlock.store.schema_version import COMPATIBLE_SINCE, schema_of


class Status(NamedTuple):
    """The schema of a database, and what this program has to do with it."""

    schema: str
    # The oldest schema whose program can work on it.
    compatible_since: str
    # Of the migrations of this program, those that are not applied yet.
    pending: list[Migration]
    # What undoing the last one would lose, as numbers of rows; None where it cannot be undone.
    at_stake: dict[str, int] | None


def status(home: Home) -> Status:
    """The schema of a database, without changing it. Refuses (E3804) where there is none, or it is not ours."""
    if home.new:
        raise Failure("E3804", "there is no database yet", resolution="it is made by the first command that needs it")
    with opened(home) as reader:
        schema = str(schema_of(reader))
        row = reader.one("SELECT value FROM fact WHERE name = ?", (COMPATIBLE_SINCE,))
        try:
            stake = at_stake(last_applied(schema)[0], reader)
        except Failure:
            stake = None
    return Status(schema, schema if row is None else row[0], pending_at(schema), stake)
