"""Reads of the table `journal`: the records of calls, as they were written.

A record is canonical JSON. `kind` and `call` are columns as well, so that the records of a call are found by an index.
Only the journal itself writes to this table.
"""

from __future__ import annotations

from interlock.store.port import Reader


def of_call(reader: Reader, call: str) -> list[bytes]:
    """Every record of a call, oldest first."""
    return [body for (body,) in reader.all("SELECT body FROM journal WHERE call = ? ORDER BY seq", (call,))]


def of_kind(reader: Reader, call: str, kind: str) -> list[bytes]:
    """The records of a kind about a call, oldest first."""
    statement = "SELECT body FROM journal WHERE call = ? AND kind = ? ORDER BY seq"
    return [body for (body,) in reader.all(statement, (call, kind))]
