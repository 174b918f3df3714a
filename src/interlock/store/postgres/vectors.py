"""Table `tool_vector` on a PostgreSQL server with pgvector: vectors of tools, and the search for the nearest of them.

A row has the vector of one text by one model, with the model and the dimension. The table is made when a process first
needs it (the setting `search_vectors`), by the owner of the schema: most stores have no use for it, and pgvector may
come later. Everything in it can be computed again, so it is not copied with the store.

There is no index over the vectors. A search is about the tools that its caller sees and no others, and an approximate
index looks for the nearest of all rows before it leaves some out: it would find too few, and tell of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from interlock.core.record import NamedTuple
from interlock.store.postgres.schema import VECTORS_TABLE, quoted

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.port import Reader, Transaction
    from interlock.store.postgres.home import PostgresHome

MOST_BYTES: Final = 2 * 2**30
# The first version of pgvector that has vectors of two bytes a number.
_LEAST: Final = (0, 7)
_EXTENSION = """
SELECT extversion::text, nspname::text FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
WHERE extname = 'vector'
"""
_THERE = f"SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = '{VECTORS_TABLE}'"  # noqa: S608
_TABLE = f"""CREATE TABLE IF NOT EXISTS {VECTORS_TABLE} (number BIGINT PRIMARY KEY, model TEXT COLLATE "C" NOT NULL,
    dimension BIGINT NOT NULL, digest BYTEA NOT NULL, vector %s NOT NULL, UNIQUE (model, digest))"""


class NoVectors(Exception):  # noqa: N818 - a finding about the database
    """The database cannot keep vectors. The text says why."""


class VectorTable(NamedTuple):
    """The table of a store. The extension may be in any schema, so its names are written with it."""

    type: str
    distance: str

    def numbers(self, reader: Reader, model: str, dimension: int, digests: Sequence[bytes]) -> dict[bytes, int]:
        """The numbers of the rows that a model has for texts, by the digests of these."""
        rows = reader.all(
            f"SELECT digest, number FROM {VECTORS_TABLE}"  # noqa: S608 - constants
            " WHERE model = ? AND dimension = ? AND digest = ANY(?)",
            (model, dimension, list(digests)),
        )
        return {bytes(digest): number for digest, number in rows}

    def put(self, transaction: Transaction, model: str, rows: Sequence[tuple[bytes, Sequence[float]]]) -> None:
        """Store the vectors of texts by their digests, in place of those of another dimension.

        Removes the oldest rows above `MOST_BYTES`.
        """
        for digest, vector in rows:
            # Not a sequence: one transaction at a time writes, and a unit that is run again gives the same numbers.
            transaction.execute(
                f"INSERT INTO {VECTORS_TABLE} (number, model, dimension, digest, vector)"  # noqa: S608 - constants
                f" SELECT coalesce(max(number), 0) + 1, ?, ?, ?, CAST(? AS {self.type}) FROM {VECTORS_TABLE}"
                " ON CONFLICT (model, digest) DO UPDATE SET dimension = excluded.dimension, vector = excluded.vector"
                f" WHERE {VECTORS_TABLE}.dimension <> excluded.dimension",
                (model, len(vector), digest, _text(vector)),
            )
        if rows:
            most = MOST_BYTES // (2 * len(rows[0][1]))
            transaction.execute(
                f"DELETE FROM {VECTORS_TABLE} WHERE number <= (SELECT max(number) FROM {VECTORS_TABLE}) - ?",  # noqa: S608
                (most,),
            )

    def similar(
        self, reader: Reader, numbers: Sequence[int], asked: Sequence[Sequence[float]], most: int | None
    ) -> list[tuple[Any, ...]]:
        """Compare the vectors of some rows with those asked for.

        Returns the number of each row, and its cosine similarity (1 - distance) to each vector asked for. With `most`,
        only that many rows, those nearest to the first vector, nearest first. Without it, all rows, in no order.
        """
        columns = ", ".join(
            f"1 - (vector {self.distance} CAST(?{place} AS {self.type}))" for place in range(3, 3 + len(asked))
        )
        end = "" if most is None else f" ORDER BY 2 DESC FETCH FIRST (?{3 + len(asked)}) ROWS WITH TIES"
        return reader.all(
            f"SELECT number, {columns} FROM {VECTORS_TABLE}"  # noqa: S608 - constants
            f" WHERE number = ANY(?1) AND dimension = ?2{end}",
            (list(numbers), len(asked[0]), *map(_text, asked), *(() if most is None else (most,))),
        )


def in_database(reader: Reader, home: Home) -> VectorTable:
    """The table of vectors as the database would have it; NoVectors where there can be none."""
    if home.near:
        raise NoVectors("the store is a file")
    extension = reader.one(_EXTENSION)
    if extension is None:
        raise NoVectors("the database lacks the extension `vector`: CREATE EXTENSION vector")
    version, schema = extension
    if tuple(int(one) for one in version.split(".")[:2]) < _LEAST:
        raise NoVectors(f"pgvector {version} is too old: 0.7 or later is needed")
    return VectorTable(f"{quoted(schema)}.halfvec", f"OPERATOR({quoted(schema)}.<=>)")


def opened(home: Home) -> VectorTable:
    """The table of vectors in the store of a data directory, made if need be; NoVectors where there can be none."""
    with closing(home.connect()) as connection:
        table = in_database(connection, home)
        there = connection.one(_THERE) is not None
    if not there:
        with cast("PostgresHome", home).changing_schema() as changing:
            changing.exec_driver_sql(_TABLE % table.type)
    return table


def _text(vector: Sequence[float]) -> str:
    return orjson.dumps(list(vector)).decode()
