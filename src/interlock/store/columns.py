"""A table of a store with its columns, for those that copy rows from one database to another."""

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
