"""The data directory, `Home`: with the database, the keys, and the locks of the processes alive on it.

A database that is gone, emptied or set back has lost the record of its calls, and would make them again. Files beside
it show that there was one: the public key that signs its journal, and the anchors. Both are written after the records
they refer to are in the database. INVARIANT: a home is opened only with a database that holds the record which its
newest anchor names; a new one is made only where nothing was ever signed.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.store import epochs
from interlock.store.connection import SqliteConnection
from interlock.store.failures import RESTORE, no_room, store_failure
from interlock.store.instance import Instance, held
from interlock.store.journal_connection import apply_log, connect, connected, extend_log, for_journal
from interlock.store.lock_board import Board, FileBoard
from interlock.store.port import Listener, Reader, StoreConnection, StoreError
from interlock.store.schema_version import APPLICATION_ID, is_known, refuse_changed, refuse_running
from interlock.store.timekeeping import StoreTime
from interlock.store.turns import Turns

if TYPE_CHECKING:
    from interlock.store.epochs import Epochs
    from interlock.store.shared_version import SharedConfig

_INSTANCE = expression(r"[0-9A-Z]{26}\Z")
# The number of bytes at the end of the anchors file that are read: some twenty lines, which concurrent writers may have
# swapped.
_TAIL = 8192
# The file that says of a data directory that it is a copy of one whose store is on a server.
MARK = ".backup"


# many methods: paths and signs of life on the one hand, access to the database on the other
class Home:
    """Paths of one home, made on first use and readable by their owner alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.database = self.path / "interlock.db"
        self.keys = self.path / "keys"
        self.instances = self.path / "instances"
        self.anchors = self.path / "anchors.jsonl"
        self.incomplete = self.path / ".incomplete"
        self.policy = self.path / "policy.cedar"
        self.principals = self.path / "principals.toml"
        self.settings = self.path / "settings.toml"
        self.manifests = self.path / "manifests"
        self.sandbox = self.path / "sandbox.lock"
        self.turns = self.path / "turns.lock"
        # What the store has in place of policy, principals and settings here; None if these files count.
        self.shared: SharedConfig | None = None
        # Whether the shared settings in force are others than those with which this process was started.
        self.other_settings = False

    def prepare(self) -> None:
        """Make the directories; a home that cannot be written is refused at once (E3801), and half a copy (E3804)."""
        try:
            # INVARIANT: where a copy is being made, or was given up, no new home is made: it would know of no call.
            if self.incomplete.exists() and not self.database.exists():
                advice = "let it end; if nothing makes it any more, remove what is there and restore the backup again"
                raise Failure("E3804", "the copy in this data directory was not finished", resolution=advice)
            for directory in (self.path, self.keys, self.instances):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _unusable(error) from None

    @property
    def new(self) -> bool:
        """Whether there is no database yet. One that is gone or empty though it was signed is refused (E3804)."""
        try:
            # Looked at first: a process that signs has made the database before.
            signed = (self.keys / "journal.pub").exists() or _size(self.anchors) > 0
            if _size(self.database) > 0:
                return False
        except OSError as error:
            raise _unusable(error) from None
        if signed:
            raise Failure(
                "E3804",
                "the database of this data directory is missing or empty, though it had one",
                resolution=RESTORE,
            )
        return True

    def beside(self, path: Path) -> Home:
        """The same store, with the files of another directory."""
        return Home(path)

    def named(self, name: str) -> Path:
        """A file that settings name: relative to this directory or, if it is only there, to the working directory."""
        path = self.path / name
        return Path(name) if not os.path.exists(path) and os.path.exists(name) else path

    @property
    def made(self) -> bool:
        """Whether there is a database."""
        return self.database.exists()

    def last_anchor(self) -> tuple[int, bytes] | None:
        """The newest head that the anchors file names. Lines that say nothing are left to `audit verify`."""
        try:
            with open(self.anchors, "rb") as file:
                file.seek(max(_size(self.anchors) - _TAIL, 0))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return None
        return max(filter(None, map(_head_in, lines)), default=None)

    # Access to the database. `postgres.home.PostgresHome` has others.

    # Whether a commit takes so little time that the event loop may wait for it.
    near = True

    def replaced(self, connection: StoreConnection) -> StoreConnection:
        """Close a broken connection and return a new one."""
        connection.close()
        return self.connect()

    def connect(self) -> StoreConnection:
        """A connection that reads and writes, as the journal needs it."""
        return connect(self.database)

    def reading(self, patience_s: float = 10, *, alone: bool = False) -> StoreConnection:
        """A connection for reading. It waits `patience_s` seconds for a lock of another process.

        It cannot write, and leaves the files of the write-ahead log behind. With `alone`, for a database that nobody
        else has opened, it removes them when it is closed.
        """
        address = f"{self.database.absolute().as_uri()}?mode={'rw' if alone else 'ro'}"
        connection = sqlite3.connect(
            address,
            uri=True,
            timeout=patience_s,
            isolation_level=None,
            check_same_thread=False,
            factory=SqliteConnection,
        )
        connection.execute("PRAGMA trusted_schema=OFF")
        return connection

    def verifying(self, *, immutable: bool) -> StoreConnection:
        """A connection for reading that hands texts out as bytearray. `immutable`: nobody has the file open."""
        how = "mode=ro&immutable=1" if immutable else "mode=ro"
        address = f"file:{quote(os.path.abspath(self.database))}?{how}"
        connection = sqlite3.connect(address, uri=True, timeout=10, isolation_level=None, factory=SqliteConnection)
        connection.text_factory = bytearray
        connection.execute("PRAGMA trusted_schema=OFF")
        return connection

    def is_ours(self, connection: Reader) -> bool:
        """Whether Interlock made this database."""
        return connection.one("PRAGMA application_id")[0] == APPLICATION_ID

    def wait_for_locks(self, connection: StoreConnection, patience_s: float) -> None:
        """Let statements wait so long for a lock of another process."""
        connection.execute(f"PRAGMA busy_timeout={patience_s * 1000:.0f}")

    def identity(self) -> object:
        """Something that changes when the database is removed or replaced by another one."""
        try:
            status = os.stat(self.database)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def queue(self) -> Turns:
        """The turns of a process that writes."""
        return Turns(self.turns)

    def clock(self, clock: Clock) -> Clock:
        """The clock from which the time of the store comes: that of the machine."""
        return clock

    def node_clock(self, clock: Clock) -> Clock:
        """The clock that a process goes by outside transactions. Where machines share a store, it is the store's."""
        return clock

    def now_ms(self, reader: Reader) -> int:
        """The time now, by the clock that processes go by. `reader` is a connection to the store."""
        return Clock().now_ms()

    def store_ms(self, reader: Reader) -> int:
        """The store's time now, as the next transaction would have it. `reader` is a connection to the store."""
        return StoreTime(Clock(), reader).read()

    def epochs(self, reader: Reader) -> Epochs:
        """All epochs at this moment."""
        return epochs.read(reader)

    def notify(self, connection: StoreConnection) -> None:
        """Wake the readers of changes of all processes when the transaction that is open is committed, if possible."""

    def listener(self, news: Callable[[], None]) -> Listener | None:
        """Call `news` on a thread when a process has notified others, until it is closed; None if that is not possible.

        A file is read every few milliseconds instead, which costs next to nothing.
        """
        return None

    def instance(self, instance_id: str) -> Instance:
        """Show that this process lives."""
        return Instance(self, instance_id)

    def lock_board(self, instance: Instance) -> Board:
        """The board by which processes share their resource locks: a file, which those of this directory reach."""
        return FileBoard(self.path / "locks.board", instance)

    def apply_log(self) -> None:
        """Copy what the log of the database holds to its file, as far as no reader needs it. Writers go on."""
        apply_log(self.database)

    def extend_log(self, connection: StoreConnection) -> None:
        """Make the log of the database as long as it gets, in a transaction that is open. It is rolled back."""
        extend_log(connection)

    def stop_waiting(self) -> None:
        """Let a writer that waits for a server give up in a while: the process ends."""

    def open_database(self) -> StoreConnection:
        """A connection to a database that is ours, whole and at the schema this program knows."""
        self.prepare()
        try:
            # Before the database is looked at: an anchor is there before it is in the file.
            anchored = self.last_anchor()
            connection = self._known()
            if connection is None:
                connection = self._migrated()
            try:
                refuse_behind(connection, anchored)
            except BaseException:
                connection.close()
                raise
            return connection
        except StoreError as error:
            raise store_failure(error) from None
        except UnicodeDecodeError:  # what the driver makes of a damaged schema
            raise Failure("E3804", "the database in this data directory is damaged") from None
        except OSError as error:
            raise _unusable(error) from None

    def _migrated(self) -> StoreConnection:
        """Make the database, or bring it to the schema of this program."""
        from interlock.store import migration  # its imports are for a first start and an upgrade

        if not self.new:
            migration.up(self)
            return connect(self.database)
        # Several processes may start at once; one makes the database, the others wait and find it done.
        with self._migrating():
            connection = self._known()
            if connection is None:
                migration.create(self.database)
                connection = connect(self.database)
            return connection

    def _migrating(self) -> IO[str]:
        """The lock of a process that makes or changes the schema, held until it is closed."""
        lock = open(self.path / "migrate.lock", "w")  # noqa: SIM115 - the caller closes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    @contextmanager
    def changing_schema(self) -> Generator[Any]:
        """A transaction of SQLAlchemy in which the schema may be changed. One process at a time has it."""
        from interlock.store import migration

        with self._migrating(), migration.transaction(self.database) as connection:
            yield connection

    def still_known(self, reader: Reader) -> None:
        """Refuse (E3804, E3805) a schema that was changed since it was opened; asked once this process shows life.

        `reader` is a connection of the process that is in no transaction.
        """
        # INVARIANT: a process that migrates holds this lock from before it looks for others until it has committed. So
        # either it finds this process's sign of life and leaves the schema alone, or what it has made is seen here.
        with open(self.path / "migrate.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            refuse_changed(reader)

    def runs(self, owner: str) -> bool:
        """Whether the process with this instance id lives."""
        return _INSTANCE.match(owner) is not None and held(self.instances / f"{owner}.lock")

    def alive(self) -> int:
        """The number of processes that run on this home now, including this one if it does."""
        return sum(held(path) for path in self.instances.glob("*.lock"))

    def in_use(self) -> int:
        """The number of processes that may write to this store. Those that are taken for dead may not, from now on."""
        return self.alive()

    def others(self) -> int:
        """The number of processes of other data directories that may write to this store, counted as by `in_use`."""
        return 0

    def signs_of_life(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what each living process on this home last wrote into its sign of life."""
        for path in sorted(self.instances.glob("*.lock")):
            try:
                text = path.read_bytes() if held(path) else b""
                if text:
                    yield path.stem, orjson.loads(text)
            except (OSError, ValueError):
                continue  # it ended, or is writing just now

    def refuse_in_use(self, schema: str, target: str, oldest: str) -> None:
        """Refuse (E3804) to change the schema under processes that run.

        On a server, those may run on that know a schema between `oldest` and `target`.
        """
        refuse_running(self.alive(), schema, target)

    def _known(self) -> StoreConnection | None:
        """A connection to the database, if this program can work on it as it is.

        Refuses one that is not ours (E3804), and a newer one that it cannot work on (E3805).
        """
        if self.new:
            return None
        with ExitStack() as opened:
            connection = opened.enter_context(closing(connected(self.database, SqliteConnection, patience_s=10)))
            # Before anything of it is changed: the connection of a journal switches the database to WAL.
            if not self.is_ours(connection):
                raise Failure("E3804", "the database in this data directory was not made by Interlock")
            if not is_known(connection):
                return None
            self.wait_for_locks(connection, 0)
            for_journal(connection)
            opened.pop_all()
        return connection


def refuse_behind(reader: Reader, anchored: tuple[int, bytes] | None) -> None:
    """Refuse (E3804) a database that does not hold the record which an anchor names, and did not purge it either."""
    if anchored is None:
        return
    seq, digest = anchored
    row = reader.one("SELECT hash FROM journal WHERE seq = ?", (seq,))
    if row is None:
        row = reader.one(_PURGED, (seq, digest))
    if row is None or row[0] != digest:
        what = "is missing" if row is None else "is another one"
        words = f"the database is not as this data directory left it: record {seq}, which anchors.jsonl names, {what}"
        raise Failure("E3804", words, resolution=RESTORE)


_PURGED = "SELECT CASE last_seq WHEN ?1 THEN hash ELSE ?2 END FROM segment WHERE ?1 BETWEEN first_seq AND last_seq"


def _head_in(line: bytes) -> tuple[int, bytes] | None:
    """The head that a line of the anchors file names, None for half a line or nonsense."""
    try:
        fields: Any = orjson.loads(line)
        seq, digest = fields["seq"], bytes.fromhex(fields["hash"])
    except (ValueError, TypeError, KeyError):
        return None
    return (seq, digest) if type(seq) is int and 0 < seq < 2**63 else None


def _unusable(error: OSError) -> Failure:
    return no_room(error) or Failure("E3801", f"the data directory cannot be used: {error.strerror}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
