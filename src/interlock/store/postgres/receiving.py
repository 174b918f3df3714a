"""Receives the rows of another store in an empty schema (`store.copying`).

The tables are made and filled in one transaction, with a table that says that the copy is not finished. So a copy that
is ended at any moment leaves nothing, or that table, by which the store is refused and the copy can be begun again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from interlock.core.errors import Failure
from interlock.store.port import StoreError
from interlock.store.postgres import schema
from interlock.store.postgres.connection import PostgresConnection

if TYPE_CHECKING:
    from interlock.store.columns import Columns
    from interlock.store.postgres.home import PostgresHome

_SEQUENCES = """
SELECT s.relname::text, t.relname::text, a.attname::text FROM pg_class s
JOIN pg_depend d ON d.objid = s.oid AND d.deptype = 'a' JOIN pg_class t ON t.oid = d.refobjid
JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
WHERE s.relkind = 'S' AND s.relnamespace = current_schema()::regnamespace
"""


class _Receiver:
    def __init__(self, home: PostgresHome, connection: PostgresConnection) -> None:
        self.home = home
        self._connection = connection

    def begin(self, role: str | None) -> None:
        connection = self._connection
        # Between two tables the rows of a source are counted, and nobody else uses the store before it is complete.
        connection.execute("SET idle_in_transaction_session_timeout = 0")
        connection.execute("BEGIN")
        for statement in schema.alone():
            connection.execute(statement)
        if connection.one(schema.UNFINISHED) is not None:
            schema.remove(connection)
        elif connection.one(schema.HAS_SCHEMA) is not None:
            words = "there is a store at that address already; nothing was copied"
            raise Failure("E3411", words, resolution="name a database or a schema without one")
        schema.create(connection, role)
        connection.execute(f"CREATE TABLE {schema.UNFINISHED_TABLE} (begun TIMESTAMPTZ NOT NULL DEFAULT now())")

    def fill(self, columns: Columns, rows: Iterator[Sequence[Any]]) -> None:
        if columns.table in ("payload_use", "fact"):
            self._connection.execute(f'DELETE FROM "{columns.table}"')  # noqa: S608 - a name of the schema
        self._connection.copy_in(columns.table, columns.names, rows)

    def commit(self, now_ms: int) -> None:
        self._connection.execute("UPDATE store_clock SET ms = greatest(ms, ?)", (now_ms,))
        for sequence, table, column in self._connection.all(_SEQUENCES):
            newest = f'SELECT max("{column}") FROM "{table}"'  # noqa: S608 - names of the schema
            self._connection.execute(f"SELECT setval('{sequence}', ({newest})) WHERE ({newest}) IS NOT NULL")
        self._connection.execute("COMMIT")

    def finish(self) -> None:
        self._connection.execute(f"DROP TABLE {schema.UNFINISHED_TABLE}")


@contextmanager
def receiving(home: PostgresHome) -> Generator[_Receiver]:
    """An empty schema that is made and filled."""
    with closing(home.administrator()) as connection:
        receiver = _Receiver(home, connection)
        try:
            receiver.begin(home.role())
            yield receiver
        except BaseException:
            # What was committed stays, with the table that says that it is not finished.
            if connection.in_transaction:
                with closing(connection):
                    try:
                        connection.execute("ROLLBACK")
                    except StoreError:
                        pass
            raise
