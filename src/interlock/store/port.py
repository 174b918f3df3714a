"""The port of the store: the only way by which repositories reach a database.

A repository is a module of functions beside this one, named for its family of tables. The first argument of each
function is a `Reader` (it only reads) or a `Transaction` (it reads and writes). SQL is written in repositories and
nowhere else; the rest of the program passes on the reader or transaction that it was given.

`Store` is what the rest of the program holds: it commits units of work (`commit`) and reads (`read`). Both are awaited,
so a database that is reached over a network can implement them. Everything that a call needs each time is in caches,
which `changes` keeps up to date.

Implementations for SQLite:
- `journal.Journal`: the store. One per process and home.
- `journal.Transaction`: a unit of the journal. It reads and writes.
- `Journal.reader`: the reader behind `Journal.read`. It reads on the event loop, and raises a `Failure` when the
  database cannot be read. Code above `store` uses `read`.
- `connection.SqliteConnection`: every connection that the store opens. It converts the errors of the driver to
  `StoreError`; `failures.store_failure` turns them into a `Failure`.

`postgres.connection.PostgresConnection` is that of a server. What the rest of the store needs of either is
`StoreConnection`, so that no signature names a type of a driver.

Rows are tuples. Integers have 64 bits, texts are `str`, binary values are `bytes`. Time comes from the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from asyncio import Future

T = TypeVar("T")


class StoreError(Exception):
    """An error of the database, whichever driver it came from: the server, the file, its locks or its disk."""


class StatementError(StoreError):
    """The fault of one statement, such as a row that is there already. Others can go on."""


class OutcomeUnknownError(StoreError):
    """Nobody can tell whether a transaction was committed. It must not be tried again."""


class RefusedByServerError(StoreError):
    """A server refuses one statement, for a table that is missing or a right that was not given. Others can go on."""


class Reader(Protocol):
    """Reads rows."""

    def one(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        """The first row; None where there is none."""
        ...

    def all(self, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        """Every row."""
        ...

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        """Every row, one after the other, for results that are too large for a list."""
        ...


class Changed(Protocol):
    """The result of a statement that writes."""

    @property
    def rowcount(self) -> int:
        """The number of rows inserted, updated or deleted."""
        ...


class Statements(Protocol):
    """Executes statements on a connection, one after the other. The result of one is gone with the next."""

    def execute(self, statement: str, parameters: Any = ..., /) -> Any: ...


class StoreConnection(Reader, Protocol):
    """A connection to the database of a store. It raises `StoreError`."""

    @property
    def lost(self) -> bool:
        """Whether the way to the database is gone."""
        ...

    @property
    def openings(self) -> int:
        """The number of times it was reached: behind the same address, another database may have taken its place."""
        ...

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, usable or not."""
        ...

    @property
    def intact(self) -> bool:
        """Whether a transaction is open that can go on."""
        ...

    @property
    def total_changes(self) -> int:
        """The number of rows that statements of this connection have changed."""
        ...

    def execute(self, statement: str, parameters: Any = ..., /) -> Any:
        """Run a statement and return its result, in which `rowcount`, `fetchone` and `fetchall` are."""
        ...

    def statements(self) -> Statements:
        """Return a cursor for many statements. Making one for each takes as long as a short statement."""
        ...

    def reopen(self) -> None:
        """Connect again if the connection is lost."""
        ...

    def insist(self, work: Callable[[], T]) -> T:
        """Run a function that only reads, as often as it takes until the database has answered it."""
        ...

    def close(self) -> None:
        """Let go of the database."""
        ...


class ShortReader(Reader, Protocol):
    """A reader for short reads on the event loop. It raises a `Failure` in place of a `StoreError`."""

    def close(self) -> None:
        """Let go of the database."""
        ...


class EarlyRow(NamedTuple):
    """A row of a unit that is inserted before the units of its batch run, together with the rows of the others.

    The statement inserts a row unless something stands against it, and returns the ids of the rows that it inserted.
    Its first parameter is the time of the transaction; `{rows}` stands for the values of any number of rows.
    """

    statement: str
    id: str
    values: Sequence[Any]


class EndedCall(NamedTuple):
    """A call that was closed by somebody else than its task: `tool` has the version, `state` is how it ended."""

    call: str
    tool: str
    state: str
    code: str


class Transaction(Reader, Protocol):
    """Reads and writes rows and appends records to the journal, all of it or nothing."""

    # Set by those who change an epoch: every process on the store is to read the epochs once this is committed.
    notifies: bool

    @property
    def now_ms(self) -> int:
        """The store's time, the same for the whole transaction."""
        ...

    @property
    def head(self) -> tuple[int, bytes]:
        """The number and the hash of the last record, with those of this transaction."""
        ...

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Changed:
        """Run a statement that writes."""
        ...

    def later(self, statement: str, row: Sequence[Any], /) -> None:
        """Write a row before the next statement, or at the end of the transaction, together with others.

        In the statement `{rows}` stands for the values of any number of rows: `(?, ?), (?, ?)`. Rows of different
        statements may be written in another order.
        """
        ...

    def inserted(self, row: EarlyRow, /) -> bool:
        """Whether the early row of the unit that runs was inserted. If nothing has tried that so far, this does."""
        ...

    def once(self, look: Callable[[], T], /) -> T:
        """Call a function once per transaction, however many units ask for it, and return its value."""
        ...

    def append(self, kind: str, call: str, body: bytes) -> None:
        """Add a record to the journal."""
        ...

    def close(self, ended: EndedCall, body: bytes) -> None:
        """Add the closing record of a call that no task of this process runs; listeners get its events."""
        ...

    def has(self, kind: str, call: str) -> bool:
        """Whether the journal holds such a record of a call, or will with this transaction."""
        ...

    def newest(self, kind: str, call: str) -> Iterator[dict[str, Any]]:
        """The records of a kind about a call, the newest first."""
        ...

    def apart(self, work: Callable[..., T], *given: Any) -> T:
        """Do a piece of work. When it raises, nothing of it is left."""
        ...


# A piece of work that reads, writes and appends in one transaction. `store.journal` has its contract.
Unit: TypeAlias = Callable[[Transaction], T]


class Changes(Protocol):
    """Tells caches what other processes, and this one, changed. `store.changes` explains how."""

    @property
    def fresh_until(self) -> float:
        """A cache compares the time with this before it answers, and calls `catch_up` if it has passed."""
        ...

    def watch(
        self,
        families: tuple[str, ...],
        load: Callable[[Reader], T],
        apply: Callable[[T], None],
        *,
        also: Callable[[], object] | None = None,
    ) -> Callable[[], None]:
        """Keep a cache up to date: `load` reads what it needs, on any thread, and `apply` takes it over on the loop.

        `families` are names of epochs (`store.epochs`). Returns a function that ends this.
        """
        ...

    def start(self) -> None:
        """Begin to tell of changes also where nobody asks (`catch_up`)."""
        ...

    def hurry(self) -> None:
        """Read soon and often, as for calls: something may have changed."""
        ...

    async def look(self) -> None:
        """Let what this process has just committed count at once."""
        ...

    async def caught_up(self) -> None:
        """Make sure that what caches know is recent enough; refuses (E3801, E3803, E3804) where it is not."""
        ...

    def catch_up(self) -> None:
        """Like `caught_up`, without waiting. Refuses as well where the state is only known after a wait."""
        ...

    def try_catch_up(self) -> bool:
        """Like `catch_up`, but returns False where the state is only known after a wait."""
        ...


class Listener(Protocol):
    """Waits for notices of other processes, on a thread of its own."""

    @property
    def listening(self) -> bool:
        """Whether a notice that is sent now is heard."""
        ...

    def close(self) -> None:
        """End the thread."""
        ...


class Written(Protocol):
    """Hears of records that nobody waits for."""

    def written(self, record: bytes, error: BaseException | None) -> None:
        """A record is written, or cannot be. Called on the event loop, never by who queues the record."""
        ...


class Store(Protocol):
    """One store of a process. What `commit` and `append` have returned is durable."""

    @property
    def reader(self) -> Reader:
        """For short reads of code that cannot await. They run where they are called. All other code uses `read`."""
        ...

    @property
    def near(self) -> bool:
        """Whether a short read takes so little time that the event loop may wait for it."""
        ...

    @property
    def changes(self) -> Changes:
        """Feeds every cache of what the store holds."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether so much is queued that callers should wait for the disk."""
        ...

    @property
    def unsigned(self) -> bool:
        """Whether records at the end of the journal are not signed yet."""
        ...

    @property
    def leaves_pages(self) -> bool:
        """Whether what is removed leaves empty pages in a file of this program, which it can give back to the disk."""
        ...

    async def read(self, work: Callable[[Reader], T]) -> T:
        """Run a function that reads, and not much, and return its value. The caller may wait for the database."""
        ...

    async def commit(self, unit: Unit[T]) -> T:
        """Run a unit durably and return its value; raises its error, or E3801 or E3803 when nothing can be written."""
        ...

    async def commit_large(self, unit: Unit[T]) -> T:
        """The same for a unit that writes some hundred kilobytes. Other units have their turn between two of them."""
        ...

    def submit(self, unit: Unit[T], early: EarlyRow | None = None) -> Future[T]:
        """Queue a unit at once; the future has what `commit` returns. A queued unit runs, whatever becomes of it.

        `early` is a row that the unit asks its transaction about (`inserted`).
        """
        ...

    def append(self, kind: str, call: str, body: bytes, *, awaited: bool = True) -> Future[None]:
        """Make one record durable: await the result. One that is not `awaited` goes with the next batch."""
        ...

    def record(self, kind: str, call: str, body: bytes, listener: Written | None = None) -> None:
        """Write one record soon, without waiting for the disk. The listener hears how that ended."""
        ...

    def post(self, unit: Unit[Any]) -> None:
        """Run a unit soon, without waiting for the disk."""
        ...
