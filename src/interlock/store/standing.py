"""Standing approvals: the table `standing`, with one row per approval that was given in advance.

`tenant` is that of the caller. `arguments` is JSON: a pattern for every argument. `used` grows up to `uses`.
"""

from __future__ import annotations

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction


class StandingRow(NamedTuple):
    id: str
    tenant: str
    tool: str
    versions: str
    arguments: str
    caller: str
    uses: int
    used: int
    created_ms: int
    expires_ms: int
    granted_by: str
    revoked_ms: int | None


_COLUMNS = ", ".join(StandingRow._fields)
_SELECT = f"SELECT {_COLUMNS} FROM standing"  # noqa: S608 - constant
_INSERT = f"INSERT INTO standing ({_COLUMNS}) VALUES ({', '.join('?' * len(StandingRow._fields))})"  # noqa: S608 - constant


def find(reader: Reader, standing: str) -> StandingRow | None:
    row = reader.one(f"{_SELECT} WHERE id = ?", (standing,))
    return None if row is None else StandingRow._make(row)


def of_tool(reader: Reader, tool: str, tenant: str) -> list[StandingRow]:
    """The standing approvals of a tool for a tenant's callers; the one that expires first comes first."""
    rows = reader.all(f"{_SELECT} WHERE tool = ? AND tenant = ? ORDER BY expires_ms", (tool, tenant))
    return list(map(StandingRow._make, rows))


def every(reader: Reader) -> list[StandingRow]:
    """All standing approvals, oldest first."""
    return list(map(StandingRow._make, reader.all(f"{_SELECT} ORDER BY created_ms")))


def insert(transaction: Transaction, row: StandingRow) -> None:
    transaction.execute(_INSERT, row)


def add_use(transaction: Transaction, standing: str) -> None:
    transaction.execute("UPDATE standing SET used = used + 1 WHERE id = ?", (standing,))


def revoke(transaction: Transaction, standing: str, at_ms: int) -> None:
    transaction.execute("UPDATE standing SET revoked_ms = ? WHERE id = ?", (at_ms, standing))
