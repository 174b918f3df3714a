"""Reads of `audit verify`: a database that may hold anything, as it is.

The tables are the ledger (journal, anchor, segment) and those that are compared with it: identity, revocation, ticket
and standing, from which authority is read; reservation and session, which calls leave behind; spend, hold and cost.
Older schemas lack some of them, which is no fault here.

The connection reads only, in one transaction. Nothing stored is believed: a column may hold any type, so the fields of
rows are `Any`. The connection returns text as bytearray. No bytes can make that fail, and it tells text from a blob.
`plain` makes a text of it; rows of the compared tables and names of records come so, bodies come as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple, dataclass
from interlock.store import layout
from interlock.store.failures import no_room
from interlock.store.home import Home
from interlock.store.port import Reader, StoreError

T = TypeVar("T")

# Few rows at a time stay in the processor's cache.
AT_A_TIME = 32
# A damaged schema can make the driver stumble over its own message.
UNREADABLE: tuple[type[Exception], ...] = (StoreError, UnicodeDecodeError)

# All rows, however numbered, and by the table itself.
_RECORDS = "SELECT seq, kind, call, body, hash FROM journal NOT INDEXED ORDER BY seq"
_ANCHORS = "SELECT seq, hash, at_ms, key_id, signature FROM anchor ORDER BY seq"
_SEGMENTS = "SELECT last_seq, hash, at_ms, key_id, signature, first_seq FROM segment ORDER BY last_seq"
_OF_AUTHORITY = (
    "SELECT seq, kind, call, body FROM journal NOT INDEXED"
    " WHERE kind IN ('authority', 'approval', 'pending', 'purge') ORDER BY seq"
)
_OF_A_CALL = (
    "SELECT seq, kind, body FROM journal WHERE call = ? AND kind IN ('intent', 'closed', 'late', 'settled')"
    " ORDER BY seq"
)
_OF_KEYS_AND_SESSIONS = (
    "SELECT seq, kind, call, body FROM journal NOT INDEXED WHERE kind IN ('intent', 'settled')"
    " OR (kind = 'closed' AND (instr(body, CAST('\"outcome\":\"unknown\"' AS BLOB)) > 0"
    " OR instr(body, CAST('\"sessionVersion\":' AS BLOB)) > 0)) ORDER BY seq"
)
_OPEN = (
    "SELECT seq, call FROM journal AS begun WHERE kind = 'intent' AND NOT EXISTS (SELECT 1 FROM journal"
    " WHERE journal.call = begun.call AND kind IN ('closed', 'late', 'settled')) ORDER BY seq"
)
_OF_COSTS = (
    "SELECT seq, kind, call, body FROM journal NOT INDEXED WHERE kind IN ('closed', 'late', 'authority')"
    " AND (instr(body, CAST('\"cost\":' AS BLOB)) > 0 OR instr(body, CAST('\"budgets\":' AS BLOB)) > 0"
    " OR instr(body, CAST('\"cost.charged\"' AS BLOB)) > 0) ORDER BY seq"
)
_UNRECORDED_COSTS = (
    "SELECT call FROM cost WHERE NOT EXISTS (SELECT 1 FROM journal WHERE journal.call = cost.call"
    " AND kind IN ('closed', 'late', 'authority'))"
)


# The file


@dataclass(frozen=True, slots=True)
class Stamp:
    """Facts about the database file that change when somebody writes to it."""

    beside: bool
    size: int
    modified_ns: int


def stamp(database: Path) -> Stamp:
    status = database.stat()
    # A log that others would apply or roll back before they read belongs to what they read.
    beside = any(database.with_name(database.name + suffix).exists() for suffix in ("-wal", "-journal"))
    return Stamp(beside, status.st_size, status.st_mtime_ns)


@contextmanager
def opened(home: Home, *, immutable: bool) -> Generator[Reader]:
    """The database in one read transaction. E3804 when it cannot be read or is not ours, E3803 for a full disk.

    `immutable`: nobody has the file open. Then nothing is made beside it, and it may lie on read-only media.
    """
    try:
        with closing(home.verifying(immutable=immutable)) as connection:
            connection.execute("BEGIN")
            _refuse_foreign(home, connection)
            yield connection
    except UNREADABLE as error:
        full = no_room(error) if isinstance(error, StoreError) else None
        raise full or Failure("E3804", f"the database in this data directory cannot be read: {reason(error)}") from None


def reason(error: Exception) -> str:
    """The words for an error of `UNREADABLE`."""
    return str(error) if isinstance(error, StoreError) else "its schema is damaged"


def _refuse_foreign(home: Home, reader: Reader) -> None:
    if not home.is_ours(reader):
        raise Failure("E3804", "the database in this data directory was not made by Interlock")
    if home.near and not layout.has_ledger(reader):
        raise Failure("E3804", "the database in this data directory has no ledger")


def plain(value: Any) -> Any:
    """A text as a text; it comes as bytearray, which tells it from a blob."""
    return value.decode("utf-8", "replace") if type(value) is bytearray else value


# The ledger


class JournalEntry(NamedTuple):
    """A record of the journal."""

    seq: Any
    kind: Any
    call: Any
    body: Any


def records(reader: Reader) -> Iterator[list[tuple[Any, Any, Any, Any, Any]]]:
    """All rows of the journal in their order, some at a time: seq, kind, call, body, hash. Names come as bytearray."""
    rows = reader.each(_RECORDS)
    while some := list(islice(rows, AT_A_TIME)):
        yield some


def anchors(reader: Reader) -> Iterator[Any]:
    """Rows of seq, hash, at_ms, key_id, signature."""
    return reader.each(_ANCHORS)


def segments(reader: Reader) -> Iterator[Any]:
    """Rows of last_seq, hash, at_ms, key_id, signature, first_seq."""
    return reader.each(_SEGMENTS)


def hash_of(reader: Reader, seq: int) -> Any:
    """The hash that is stored with a record; None when there is no such record."""
    row = reader.one("SELECT hash FROM journal WHERE seq = ?", (seq,))
    return None if row is None else row[0]


def has_anchor(reader: Reader, seq: int) -> bool:
    return reader.one("SELECT 1 FROM anchor WHERE seq = ?", (seq,)) is not None


def newest_body(reader: Reader) -> Any:
    row = reader.one("SELECT body FROM journal ORDER BY seq DESC LIMIT 1")
    return None if row is None else row[0]


def records_of_authority(reader: Reader) -> Iterator[JournalEntry]:
    """The records that identities, revocations, tickets, standing approvals and segments come from."""
    return _entries(reader.each(_OF_AUTHORITY))


def records_of_keys_and_sessions(reader: Reader) -> Iterator[JournalEntry]:
    """The records of calls whose idempotency key must be there, and those that state a session's version."""
    return _entries(reader.each(_OF_KEYS_AND_SESSIONS))


def records_of_costs(reader: Reader) -> Iterator[JournalEntry]:
    """The records that state a cost or what is spent of a budget."""
    return _entries(reader.each(_OF_COSTS))


def records_of_call(reader: Reader, call: str) -> Iterator[tuple[Any, Any, Any]]:
    """Seq, kind and body of the records of a call that change its idempotency key."""
    # Few rows, read at once: for a cursor PostgreSQL may plan to walk the whole journal in its order, for each call.
    for seq, kind, body in reader.all(_OF_A_CALL, (call,)):
        yield seq, plain(kind), body


def open_calls(reader: Reader) -> Iterator[tuple[Any, Any]]:
    """Seq and call of each intent whose call has no end on record."""
    for seq, call in reader.each(_OPEN):
        yield seq, plain(call)


def _entries(rows: Iterator[Any]) -> Iterator[JournalEntry]:
    for seq, kind, call, body in rows:
        yield JournalEntry(seq, plain(kind), plain(call), body)


# The tables that are compared with it


class IdentityRow(NamedTuple):
    did: Any
    kind: Any
    name: Any
    tenant: Any
    trust: Any
    groups: Any
    state: Any


class TicketRow(NamedTuple):
    id: Any
    state: Any
    digest: Any
    resolved_by: Any


class StandingRow(NamedTuple):
    """A standing approval."""

    id: Any
    tool: Any
    versions: Any
    caller: Any
    uses: Any
    used: Any
    expires_ms: Any
    granted_by: Any
    revoked_ms: Any


class RevocationRow(NamedTuple):
    seq: Any
    kind: Any
    ref: Any


class SegmentRow(NamedTuple):
    first_seq: Any
    last_seq: Any
    hash: Any


class KeyRow(NamedTuple):
    """An idempotency key. `result` is what a replay answers, sealed or in clear text."""

    scope: Any
    call: Any
    state: Any
    expires_ms: Any
    tool: Any
    version: Any
    key: Any
    caller: Any
    input_hash: Any
    result: Any


class HoldRow(NamedTuple):
    budget: Any
    amount: Any


class SpendRow(NamedTuple):
    budget: Any
    spent: Any
    held: Any


def identities(reader: Reader) -> Iterator[IdentityRow]:
    return _all(reader, IdentityRow, "identity", "did, kind, name, tenant, trust, groups, state")


def tickets(reader: Reader) -> Iterator[TicketRow]:
    return _all(reader, TicketRow, "ticket", "id, state, digest, resolved_by")


def standings(reader: Reader) -> Iterator[StandingRow]:
    columns = "id, tool, versions, caller, uses, used, expires_ms, granted_by, revoked_ms"
    return _all(reader, StandingRow, "standing", columns)


def revocations(reader: Reader) -> Iterator[RevocationRow]:
    return _all(reader, RevocationRow, "revocation", "seq, kind, ref")


def segment_places(reader: Reader) -> Iterator[SegmentRow]:
    return _all(reader, SegmentRow, "segment", "first_seq, last_seq, hash")


def keys(reader: Reader) -> Iterator[KeyRow]:
    columns = "scope, call, state, expires_ms, tool, version, key, caller, input_hash, result"
    return _all(reader, KeyRow, "reservation", columns)


def spends(reader: Reader) -> Iterator[SpendRow]:
    return _all(reader, SpendRow, "spend", "budget, spent, held")


def holds(reader: Reader) -> Iterator[HoldRow]:
    return _all(reader, HoldRow, "hold", "budget, amount")


def has_sessions(reader: Reader) -> bool:
    return layout.has_table(reader, "session")


def session(reader: Reader, row_id: bytes) -> tuple[Any, Any] | None:
    """Version and state of a session. One at a time: a state may be large, and there may be any number of them."""
    row = reader.one("SELECT version, state FROM session WHERE id = ?", (row_id,))
    return None if row is None else (plain(row[0]), plain(row[1]))


def payload(reader: Reader, ref: str) -> tuple[Any, Any] | None:
    """The stored body and size of a large result. The body is joined from its pieces; missing pieces are left out."""
    if not layout.has_table(reader, "payload_piece"):
        return reader.one("SELECT body, size FROM payload WHERE ref = ?", (ref,))
    row = reader.one("SELECT body, size, pieces FROM payload WHERE ref = ?", (ref,))
    if row is None or not row[2] or not isinstance(row[0], bytes):
        return row and row[:2]
    pieces = reader.all(
        "SELECT body FROM payload_piece WHERE ref = ? AND number BETWEEN 1 AND ? ORDER BY number", (ref, row[2])
    )
    return b"".join((row[0], *(bytes(piece) for (piece,) in pieces))), row[1]


def has_costs(reader: Reader) -> bool:
    return layout.has_table(reader, "cost")


def cost(reader: Reader, call: str) -> tuple[Any, Any] | None:
    """Total and parts of the cost of a call, as they are."""
    return reader.one("SELECT total, parts FROM cost WHERE call = ?", (call,))


def unrecorded_costs(reader: Reader) -> Iterator[Any]:
    """The calls that have a cost and no record that could state it."""
    for (call,) in reader.each(_UNRECORDED_COSTS):
        yield plain(call)


def _all(reader: Reader, shape: Callable[..., T], table: str, columns: str) -> Iterator[T]:
    """All rows of a table, by the table itself; none where an older schema has no such table."""
    if not layout.has_table(reader, table):
        return
    for row in reader.each(f"SELECT {columns} FROM {table} NOT INDEXED"):  # noqa: S608 - constants
        yield shape(*map(plain, row))
