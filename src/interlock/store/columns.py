"""The tables of a store with their columns, for those that copy rows from one database to another."""

from __future__ import annotations

from interlock.core.record import NamedTuple


class Columns(NamedTuple):
    """A table, its columns, and those of them that hold binary values on every database."""

    table: str
    names: tuple[str, ...]
    binary: tuple[bool, ...]

    @property
    def select(self) -> str:
        names = ", ".join(f'"{name}"' for name in self.names)
        return f'SELECT {names} FROM "{self.table}"'  # noqa: S608 - names of the schema


def tables() -> list[Columns]:
    """Every table of a store. The sums of payloads come last: triggers change them when payloads are written."""
    import sqlalchemy as sa

    from interlock.store.tables import SEALED, metadata

    found = [
        Columns(
            table.name,
            tuple(column.name for column in table.columns),
            tuple(
                isinstance(column.type, sa.LargeBinary) or (table.name, column.name) in SEALED
                for column in table.columns
            ),
        )
        for table in metadata.sorted_tables
    ]
    return sorted(found, key=lambda one: one.table == "payload_use")
