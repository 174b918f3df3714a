"""Whether keys, holds and sessions still say what the journal has on record.

A key's row decides whether a call runs, a hold is room in a budget that nobody else may use, and a session's row is
what tools remember. Who can write the file can write these rows. The records of a call say what its key must say: an
intent takes the key, a closing ends it, and what came late or was settled by a person ends it otherwise. The records
are played through in that order, and the row must say what they come to.

Two things are no fault. A key whose window has passed may be gone. And a key may be blocked (`unknown`) although its
closing is not on record yet, which lets nothing run.

Not checked: the result that a key keeps for a replay, the values of a session, and what is spent of a budget.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from interlock.audit import agreement
from interlock.core.canonical import key_scope, sealed_digest
from interlock.core.schema import Json
from interlock.store import timekeeping

TABLES = ("reservation", "session", "spend", "hold")
# Clocks of processes differ by moments, and a record is dated a moment before it is written.
_MOMENTS_MS = 120_000
_OF_A_CALL = (
    "SELECT seq, kind, body FROM journal WHERE call = ? AND kind IN ('intent', 'closed', 'late', 'settled')"
    " ORDER BY seq"
)
# Records of calls whose key must be there, whatever the time; and those that say which state a session has.
_MARKED = (
    "SELECT seq, kind, call, body FROM journal NOT INDEXED WHERE kind IN ('intent', 'settled')"
    " OR (kind = 'closed' AND (instr(body, CAST('\"outcome\":\"unknown\"' AS BLOB))"
    " OR instr(body, CAST('\"sessionVersion\":' AS BLOB)))) ORDER BY seq"
)
_FACTS = {
    "tool": "toolId",
    "version": "version",
    "key": "idempotencyKey",
    "caller": "callerId",
    "input_hash": "inputHash",
}


@dataclass(slots=True)
class _Key:
    """What the records of one call come to about its key. No state: they do not tell."""

    seq: int = 0
    state: str | None = None
    until_ms: int | None = None
    scope: bytes | None = None
    facts: Json = field(default_factory=dict[str, Any])
    _window_ms: int | None = None

    def play(self, seq: int, kind: str, record: Json) -> None:
        if kind == "intent":
            self._take(record)
        elif self.state is None:
            return  # before its intent, or after retention removed that
        elif kind == "late":
            self.state = "done"
        elif kind == "settled":
            self.state = "done" if record.get("happened") else "released"
            self._lasts_from(record)
        elif record.get("status") == "SUCCESS":
            self.state = "done" if self.state in ("executing", "unknown") else self.state
        elif self.state == "executing":
            # Without a word about the key, the call had given it back before it ran.
            self.state = cast("str | None", record.get("outcome"))
        self.seq = seq

    def _take(self, record: Json) -> None:
        self.state = "executing"
        self.facts = {column: record[name] for column, name in _FACTS.items() if name in record}
        window_s = record.get("keyWindowS")
        self._window_ms = window_s * 1000 if isinstance(window_s, int) else None
        self._lasts_from(record)
        if self._window_ms is not None:
            self.scope = key_scope(
                tenant=str(record.get("tenant")), caller=str(record.get("callerId")),
                session=str(record.get("session", "")), tool=str(record.get("toolId")),
                operation=str(record.get("operation")), key=record.get("idempotencyKey"),
                parent=record.get("parent"), given=str(record.get("inputHash")),
            )  # fmt: skip

    def _lasts_from(self, record: Json) -> None:
        made = _ms(record.get("timestamp"))
        self.until_ms = None if made is None or self._window_ms is None else made + self._window_ms


def disagreements(connection: sqlite3.Connection, purged_through: int, now_ms: int) -> Iterator[tuple[int, str]]:
    """Where these tables and the records part: the place of the newest record about it, or 0, and what it is.

    `now_ms` is the time of the verifier. The store's own time counts where it is ahead of that.
    """
    try:
        there: set[Any] = set()
        columns = "scope, call, state, expires_ms, tool, version, key, caller, input_hash"
        for row in agreement.rows(connection, "reservation", columns):
            there.add(row[1])
            yield from _compare(connection, row, complete=purged_through == 0)
        now_ms = max(now_ms, timekeeping.reached(connection), _newest(connection)) + _MOMENTS_MS
        wanted, sessions = _marked(connection, now_ms)
        for call in sorted(wanted - there):
            said = _said(connection, call)
            if said.state == "unknown" or (said.state == "done" and (said.until_ms or 0) > now_ms):
                yield said.seq, f"the key of call {call} is missing in the tables, on record it is {said.state!r}"
        yield from _compare_sessions(connection, sessions)
        yield from _compare_holds(connection)
    except (sqlite3.Error, TypeError, ValueError) as error:
        yield 0, f"the tables that calls leave behind cannot be read: {error}"


def _newest(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT body FROM journal ORDER BY seq DESC LIMIT 1").fetchone()
    record = None if row is None else agreement.parsed(row[0])
    return _ms(cast("Json", record).get("timestamp")) or 0 if isinstance(record, dict) else 0


def _compare(connection: sqlite3.Connection, row: tuple[Any, ...], *, complete: bool) -> Iterator[tuple[int, str]]:
    scope, call, state, expires_ms, tool, version, key, caller, input_hash = row
    said = _said(connection, call) if isinstance(call, str) else _Key()
    if said.state is None:
        if not said.seq and (complete or not isinstance(call, str)):
            yield 0, f"the key of call {call} is in the tables and on no record"
        return
    if said.state == "released":
        yield said.seq, f"the key of call {call} is {state!r} in the tables, on record it was given back"
        return
    if state != said.state and not (state == "unknown" and said.state == "executing"):
        yield said.seq, f"the key of call {call} is {state!r} in the tables, on record {said.state!r}"
    told = {"tool": tool, "version": version, "key": key, "caller": caller, "input_hash": input_hash}
    differ = [name for name, value in said.facts.items() if told[name] != value]
    if differ:
        words = ", ".join(f"{name} is {told[name]!r}, on record {said.facts[name]!r}" for name in differ)
        yield said.seq, f"the key of call {call} is another in the tables: {words}"
    elif said.scope is not None and scope != said.scope:
        yield said.seq, f"the key of call {call} is filed under another name than its record says"
    if said.until_ms is not None and not (type(expires_ms) is int and expires_ms >= said.until_ms - _MOMENTS_MS):
        yield said.seq, f"the key of call {call} ends in the tables before its window does"


def _said(connection: sqlite3.Connection, call: str) -> _Key:
    said = _Key()
    for seq, kind, body in connection.execute(_OF_A_CALL, (call,)):
        record = agreement.parsed(body)
        if isinstance(record, dict):
            said.play(seq, agreement.plain(kind), cast("Json", record))
    return said


def _marked(connection: sqlite3.Connection, now_ms: int) -> tuple[set[str], dict[bytes, tuple[int, int]]]:
    """Calls whose key may have to be there, and the last version of each session with the record that made it."""
    wanted: set[str] = set()
    sessions: dict[bytes, tuple[int, int]] = {}
    for seq, *names, body in connection.execute(_MARKED):
        record = agreement.parsed(body)
        if not isinstance(record, dict):
            continue
        known, (kind, call) = cast("Json", record), map(agreement.plain, names)
        version, made, window_s = known.get("sessionVersion"), _ms(known.get("timestamp")), known.get("keyWindowS")
        if kind != "intent" or (made is not None and isinstance(window_s, int) and made + window_s * 1000 > now_ms):
            wanted.add(call)
        if kind == "closed" and isinstance(version, int):
            row = sealed_digest(str(known.get("tenant")), str(known.get("callerId")), str(known.get("session", "")))
            sessions[row] = (version, seq)
    return wanted, sessions


def _compare_sessions(
    connection: sqlite3.Connection, recorded: dict[bytes, tuple[int, int]]
) -> Iterator[tuple[int, str]]:
    stored = dict(agreement.rows(connection, "session", "id, version")) if recorded else {}
    for row_id, (version, seq) in recorded.items():
        if row_id not in stored:
            yield seq, f"the state of a session is missing in the tables, on record it has version {version}"
        elif stored[row_id] != version:
            yield seq, f"the state of a session has version {stored[row_id]!r} in the tables, on record {version}"


def _compare_holds(connection: sqlite3.Connection) -> Iterator[tuple[int, str]]:
    """What budgets set aside is what calls hold: one is the sum of the other."""
    held: dict[str, Any] = {}
    for budget, amount in agreement.rows(connection, "hold", "budget, amount"):
        held[budget] = held.get(budget, 0) + amount
    for budget, spent, amount in agreement.rows(connection, "spend", "budget, spent, held"):
        wanted = held.pop(budget, 0)
        if amount != wanted:
            yield 0, f"the budget {budget} sets {amount!r} millionths aside, and calls hold {wanted!r}"
        if type(spent) is not int or spent < 0:
            yield 0, f"of the budget {budget} {spent!r} millionths are spent, which cannot be"
    for budget in held:
        yield 0, f"a call holds room in the budget {budget}, which is missing in the tables"


def _ms(timestamp: Any) -> int | None:
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
    except (TypeError, ValueError):
        return None
