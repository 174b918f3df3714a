"""Vectors of tools in a file of the data directory, so that a restart does not compute them again.

The file is a database of its own, `search/vectors.db`: everything in it can be computed again, so it is no part of the
store and of its backups. A row has the vector of one text by one model, as numbers of two bytes, with the model and the
dimension. A file that cannot be used is replaced. If it cannot be written, vectors are computed again after a restart.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 512 * 2**20
BYTES_PER_NUMBER: Final = 2
_PATIENCE_S: Final = 5.0
# A statement has room for fewer parameters than there may be texts.
_AT_ONCE: Final = 500
_TABLE = """CREATE TABLE IF NOT EXISTS tool_vector (number INTEGER PRIMARY KEY, model TEXT NOT NULL,
    dimension INTEGER NOT NULL, digest BLOB NOT NULL, vector BLOB NOT NULL, UNIQUE (model, digest))"""


class VectorCache:
    """The vectors of one model."""

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._model = model

    def get(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """The vectors of texts that are there, by the digests of these."""
        found: dict[bytes, bytes] = {}

        def read(connection: sqlite3.Connection) -> None:
            for start in range(0, len(digests), _AT_ONCE):
                some = digests[start : start + _AT_ONCE]
                rows = connection.execute(
                    "SELECT digest, dimension, vector FROM tool_vector"  # noqa: S608 - placeholders
                    f" WHERE model = ? AND digest IN ({', '.join('?' * len(some))})",
                    (self._model, *some),
                )
                found.update(
                    (digest, vector)
                    for digest, dimension, vector in rows
                    if isinstance(vector, bytes) and len(vector) == BYTES_PER_NUMBER * dimension
                )

        if self._path.exists():
            self._try(read)
        return found

    def put(self, dimension: int, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Store the vectors of texts by their digests. Removes the oldest rows above `MOST_BYTES`."""

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT INTO tool_vector (model, dimension, digest, vector) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (model, digest) DO UPDATE SET dimension = excluded.dimension, vector = excluded.vector",
                [(self._model, dimension, digest, vector) for digest, vector in rows],
            )
            most = MOST_BYTES // (BYTES_PER_NUMBER * dimension)
            connection.execute(
                "DELETE FROM tool_vector WHERE number <= (SELECT max(number) FROM tool_vector) - ?", (most,)
            )

        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._try(write)

    def _try(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Do some work in one transaction. What fails is as if it had not been tried."""
        try:
            with closing(sqlite3.connect(self._path, timeout=_PATIENCE_S)) as connection, connection:
                connection.execute(_TABLE)
                work(connection)
        except sqlite3.OperationalError:
            pass  # it cannot be written, or somebody else writes for long
        except sqlite3.DatabaseError:
            with suppress(OSError):
                self._path.unlink()
