"""A data directory whose store is on PostgreSQL: keys, policy and settings are files, all else is in the database.

Processes of several data directories, on several machines, may use one store at the same time. Each directory has the
same keys, policy and settings (`store.node_files`).
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.core.clock import Clock, boot_id
from interlock.core.errors import Failure
from interlock.store import epochs
from interlock.store.failures import RESTORE, store_failure
from interlock.store.home import Home, refuse_behind
from interlock.store.port import StoreError
from interlock.store.postgres import schema
from interlock.store.postgres.connection import PostgresConnection
from interlock.store.postgres.leases import Lease
from interlock.store.postgres.lock_board import PostgresBoard
from interlock.store.postgres.notices import SEND, Listener
from interlock.store.postgres.pooler import refuse_shared_sessions
from interlock.store.postgres.server_time import ServerTime
from interlock.store.schema_version import is_known, refuse_changed, refuse_running

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from interlock.store.epochs import Epochs
    from interlock.store.instance import Instance
    from interlock.store.lock_board import Board
    from interlock.store.port import Reader, StoreConnection
    from interlock.store.turns import Turns

# How long a process that ends waits for a server that is to tell what became of the last transaction.
GIVE_UP_S = 5.0
_MACHINE = Clock()
_LOCK_TIMEOUT = "database is locked"
_TIME = (
    "greatest((SELECT last_value FROM store_time), (SELECT ms FROM store_clock),"
    " floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint)"
)
_NOW = f"SELECT {_TIME}"
_EPOCHS = f"{epochs.READ}, {_TIME}"
# Processes whose lease has run out and can still be renewed, and the end of that.
_EXPIRED = f"SELECT 1 FROM instance WHERE {schema.EXPIRED} LIMIT 1"  # noqa: S608 - constants
_EXPIRE = f"DELETE FROM instance WHERE {schema.EXPIRED}"  # noqa: S608 - constants


class Queue:
    """The turns of a process that writes: the server keeps the queue of those who wait for its lock."""

    contended = False

    def __init__(self, home: PostgresHome, writer: PostgresConnection) -> None:
        self._home = home
        self._writer = writer

    def begin(self, execute: Callable[[str], Any], patience_s: float) -> bool:
        """Begin a transaction when no other process has one. False when that took too long."""
        return self._home.begin(self._writer)

    def look(self) -> None:
        """Nothing is to be seen: the server knows who waits."""

    def close(self) -> None:
        """Nothing is held."""


# many methods: those of a home, as another database has them
class PostgresHome(Home):
    """A home with a store at an address; at `admin_address` for the owner of the schema, who makes and changes it."""

    near = False

    def __init__(self, path: str | os.PathLike[str], address: str, admin_address: str = "") -> None:
        super().__init__(path)
        self.address = address
        self.admin_address = admin_address or address
        # The lease that this process has. Without one it may write, as it does when it opens the store.
        self._lease: Lease | None = None
        # The time of the transaction that is open, and the server's time at any moment.
        self._now_ms = 0
        self._time = ServerTime(_MACHINE)
        # The connection of the writer that was opened last, which asks for its queue next.
        self._writer: PostgresConnection | None = None
        self._give_up_at = math.inf

    @property
    def new(self) -> bool:
        try:
            with closing(self._connect(self.address)) as connection:
                there = connection.one(schema.HAS_SCHEMA) is not None
        except StoreError as error:
            raise store_failure(error) from None
        if not there and ((self.keys / "journal.pub").exists() or self.last_anchor() is not None):
            words = "the database has no store of Interlock, though this data directory had one there"
            raise Failure("E3804", words, resolution=RESTORE)
        return not there

    @property
    def place(self) -> str:
        """Which data directory on which machine this is. A copy is another one."""
        there = self.path.stat()
        return f"{boot_id() or platform.node()}:{there.st_dev}:{there.st_ino}"

    def beside(self, path: Path) -> PostgresHome:
        return PostgresHome(path, self.address, self.admin_address)

    @property
    def made(self) -> bool:
        return not self.new

    # Connections

    def connect(self) -> StoreConnection:
        return self._connect(self.address, reading=True)

    def replaced(self, connection: StoreConnection) -> StoreConnection:
        if isinstance(connection, PostgresConnection):
            connection.hang_up()  # the next transaction opens it again
        return connection

    def reading(self, patience_s: float = 10, *, alone: bool = False) -> StoreConnection:
        return self._connect(self.address, reading=True)

    def verifying(self, *, immutable: bool) -> StoreConnection:
        return self._connect(self.address, reading=True, text_as_bytes=True)

    @staticmethod
    def _connect(address: str, *, reading: bool = False, text_as_bytes: bool = False) -> PostgresConnection:
        return PostgresConnection(address, reading=reading, text_as_bytes=text_as_bytes)

    def administrator(self) -> PostgresConnection:
        """A connection of the owner of the tables, who may change the schema and remove what is past its term."""
        return PostgresConnection(self.admin_address)

    def is_ours(self, connection: Reader) -> bool:
        return connection.one(schema.HAS_SCHEMA) is not None

    def wait_for_locks(self, connection: StoreConnection, patience_s: float) -> None:
        """Nothing to do: every connection that writes waits for the same time."""

    def identity(self) -> object:
        return self.address

    def lock_board(self, instance: Instance) -> Board:
        return PostgresBoard(cast("Lease", instance))

    def apply_log(self) -> None:
        """Nothing to do: the server does it."""

    # Writing

    def open_database(self) -> StoreConnection:
        self.prepare()
        try:
            anchored = self.last_anchor()
            self._migrate()
            connection = self._connect(self.address)
            try:
                refuse_behind(connection, anchored)
                self._now_ms = self.now_ms(connection)
            except BaseException:
                connection.close()
                raise
        except StoreError as error:
            raise store_failure(error) from None
        self._writer = connection
        self._writer.gives_up = lambda: time.monotonic() >= self._give_up_at
        return connection

    def queue(self) -> Turns:
        return cast("Turns", Queue(self, cast("PostgresConnection", self._writer)))

    def begin(self, writer: PostgresConnection) -> bool:
        """Begin a transaction of a writer: under the lock, with the lease checked and the time of the database."""
        if writer.lost:
            writer.reopen()
        try:
            writer.execute("BEGIN")
            asked_at = self._time.uptime()
            self._now_ms, writer.xid = writer.one("SELECT now_ms, xid FROM interlock_enter(?)", (self.lease,))
            self._time.learn(self._now_ms, asked_at)
        except StoreError as error:
            if not writer.lost:
                writer.execute("ROLLBACK")
            if _LOCK_TIMEOUT in str(error):
                return False
            raise
        except Failure:
            if self._lease is not None:
                self._lease.lost = True
            writer.execute("ROLLBACK")
            raise
        return True

    def clock(self, clock: Clock) -> Clock:
        """The clock of the database, unless the caller has brought another one than the machine's."""
        return replace(clock, now_ms=lambda: self._now_ms) if clock.now_ms is _MACHINE.now_ms else clock

    def node_clock(self, clock: Clock) -> Clock:
        return replace(clock, now_ms=self._time.now_ms) if clock.now_ms is _MACHINE.now_ms else clock

    def now_ms(self, reader: Reader) -> int:
        asked_at = self._time.uptime()
        now_ms: int = reader.one(_NOW)[0]
        self._time.learn(now_ms, asked_at)
        return now_ms

    def store_ms(self, reader: Reader) -> int:
        return self.now_ms(reader)

    def epochs(self, reader: Reader) -> Epochs:
        asked_at = self._time.uptime()
        *found, now_ms = reader.one(_EPOCHS)
        self._time.learn(now_ms, asked_at)
        return epochs.Epochs._make(found)

    def notify(self, connection: StoreConnection) -> None:
        connection.execute(SEND)

    def listener(self, news: Callable[[], None]) -> Listener:
        return Listener(self.address, news)

    def stop_waiting(self) -> None:
        self._give_up_at = min(self._give_up_at, time.monotonic() + GIVE_UP_S)

    # The schema

    def _migrate(self) -> None:
        with closing(self._connect(self.address)) as connection:
            refuse_shared_sessions(connection, self.address)
            there = connection.one(schema.HAS_SCHEMA) is not None
            if connection.one(schema.UNFINISHED) is not None:
                advice = "run interlock store copy again: it starts from the beginning"
                raise Failure("E3804", "the copy into this store was not finished", resolution=advice)
            if there and is_known(connection):
                return
        if there:
            from interlock.store import migration  # its imports are for an upgrade

            migration.up(self)
            return
        with closing(self.administrator()) as admin:
            schema.make(admin, self.role())

    @contextmanager
    def changing_schema(self) -> Generator[Any]:
        try:
            with schema.changing(self.admin_address, self.role()) as connection:
                yield connection
        except StoreError as error:
            raise store_failure(error) from None

    def refuse_in_use(self, schema: str, target: str, oldest: str) -> None:
        heads = [orjson.loads(report or b"{}").get("schema", "") for report, _ in self._users()]
        refuse_running(sum(not oldest <= head <= target for head in heads), schema, target)

    def role(self) -> str | None:
        """The role of processes, where it is not that of the owner of the tables."""
        if self.admin_address == self.address:
            return None
        with closing(self._connect(self.address)) as connection:
            return connection.one("SELECT current_user::text")[0]

    def still_known(self, reader: Reader) -> None:
        # INVARIANT: a process that migrates holds this lock from before it looks for others until it has committed. So
        # either it finds the lease of this process and what it knows, or what it has made is seen here.
        with closing(self._connect(self.address)) as connection:
            connection.execute("SET lock_timeout = 0")
            connection.execute("BEGIN")
            connection.execute(f"SELECT pg_advisory_xact_lock_shared({schema.MIGRATING})")
            refuse_changed(connection)
            connection.execute("COMMIT")

    # Signs of life

    def instance(self, instance_id: str) -> Instance:
        lease = Lease(self, instance_id, address=self.address, place=self.place, holds=self._hold)
        return cast("Instance", lease)

    def _hold(self, lease: Lease | None) -> None:
        """Write under a lease from now on."""
        self._lease = lease

    @property
    def lease(self) -> str:
        """The id of the lease that this process has, if it has one."""
        return "" if self._lease is None else self._lease.id

    def runs(self, owner: str) -> bool:
        return bool(self._living("AND id = ?", (owner,)))

    def alive(self) -> int:
        return len(self._living())

    def in_use(self) -> int:
        return len(self._users())

    def others(self) -> int:
        here = self.place
        return sum(place != here for _, place in self._users())

    def signs_of_life(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for owner, report in self._living():
            if report:
                yield owner, orjson.loads(report)

    def _users(self) -> list[tuple[bytes, str]]:
        """The report and the place of every process that may write, after those have lost their lease that ran out.

        INVARIANT: nobody who is not among them writes from now on. A lease that has run out may still be renewed. So it
        is removed before others are counted, under the lock of writers: no transaction of its process is under way.
        """
        try:
            with closing(self._connect(self.address)) as connection:
                connection.execute("BEGIN")
                if connection.one(_EXPIRED) is not None:
                    connection.execute(f"SELECT pg_advisory_xact_lock({schema.WRITING})")
                    connection.execute(_EXPIRE)
                users = connection.all("SELECT report, place FROM instance ORDER BY id")
                connection.execute("COMMIT")
        except StoreError as error:
            raise store_failure(error, "read") from None
        return users

    def _living(self, where: str = "", values: Sequence[str] = ()) -> list[tuple[str, bytes]]:
        statement = (
            "SELECT id, report FROM instance"  # noqa: S608 - constants
            f" WHERE until_ms >= floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint {where} ORDER BY id"
        )
        try:
            with closing(self._connect(self.address, reading=True)) as connection:
                return connection.all(statement, values)
        except StoreError as error:
            raise store_failure(error, "read") from None
