"""Checks that idempotency keys and sessions still agree with the journal.

A key's row decides whether a call runs and what a replay answers, and a session's row holds what tools store. Anybody
who can write the file can write these rows. The records of a call determine the state of its key: an intent takes it, a
closing record ends it, and a late result or a person's settlement ends it otherwise. The records are replayed in that
order, and the row must agree with the result. The stored result of a key and the values of a session must have the
recorded digest; they are opened for that if the home's sealing keys can be read.

Two differences are no fault. A key whose window has passed may be gone. And a key may be blocked (`unknown`) although
its closing is not on record yet, which lets nothing run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.audit import agreement, amounts
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import decode, digest, key_scope, sealed_digest
from interlock.store import timekeeping, verify_reads
from interlock.store.port import StoreError

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.store.port import Reader
    from interlock.store.verify_reads import KeyRow

# Opens a value sealed for a purpose and a place. None if its sealing key is absent; a Failure if it was changed.
Open = Callable[[bytes, str, str], bytes | None]
# Clocks of processes differ slightly, and a record is dated shortly before it is written.
_MOMENTS_MS = 120_000
_FACTS = {
    "tool": "toolId",
    "version": "version",
    "key": "idempotencyKey",
    "caller": "callerId",
    "input_hash": "inputHash",
}


@dataclass(slots=True)
class _Key:
    """The state of one call's idempotency key according to the records; no state if they do not determine it."""

    seq: int = 0
    state: str | None = None
    until_ms: int | None = None
    scope: bytes | None = None
    facts: Json = field(default_factory=dict[str, Any])
    # The digest of the stored result, or the code of the failure; None if no record states it.
    result: str | None = None
    error: str | None = None
    _window_ms: int | None = None

    def play(self, seq: int, kind: str, record: Json) -> None:
        if kind == "intent":
            self._take(record)
        elif self.state is None:
            return  # before its intent, or after retention removed that
        elif kind == "late":
            self.state, self.result, self.error = "done", record.get("resultHash"), None
        elif kind == "settled":
            self.state, self.result, self.error = "done", record.get("resultHash"), None
            if not record.get("happened"):
                self.state = "released"
            self._lasts_from(record)
        elif record.get("status") == "SUCCESS":
            if self.state in ("executing", "unknown"):
                self.state, self.result = "done", record.get("resultHash")
        elif self.state == "executing":
            # If the record says nothing about the key, the call had released it before it ran.
            self.state, self.error = cast("str | None", record.get("outcome")), record.get("error_code")
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
                parent=record.get("parent"), given=str(record.get("inputHash")), call=str(record.get("call")),
            )  # fmt: skip

    def _lasts_from(self, record: Json) -> None:
        made = _ms(record.get("timestamp"))
        self.until_ms = None if made is None or self._window_ms is None else made + self._window_ms


def disagreements(
    reader: Reader, purged_through: int, now_ms: int, open_sealed: Open | None = None
) -> Iterator[tuple[int, str]]:
    """Yield differences between these tables and the records: the seq of the newest record concerned, or 0, and a text.

    `now_ms` is the time of the verifier. The store's own time counts if it is ahead of that. Without `open_sealed` (the
    sealing keys are missing), sealed results and sessions are not compared.
    """
    try:
        there: set[Any] = set()
        for row in verify_reads.keys(reader):
            there.add(row.call)
            recorded = _recorded_key(reader, row.call) if isinstance(row.call, str) else _Key()
            yield from _compare(recorded, row, complete=purged_through == 0)
            if recorded.state == row.state == "done":
                yield from _compare_result(reader, recorded, row.call, row.result, open_sealed)
        now_ms = max(now_ms, timekeeping.reached(reader), _newest(reader)) + _MOMENTS_MS
        wanted, sessions = _marked(reader, now_ms)
        for call in sorted(wanted - there):
            recorded = _recorded_key(reader, call)
            if recorded.state == "unknown" or (recorded.state == "done" and (recorded.until_ms or 0) > now_ms):
                yield (
                    recorded.seq,
                    f"the idempotency key of call {call} is missing in the tables, on record it is {recorded.state!r}",
                )
        for seq, call in verify_reads.open_calls(reader):
            if call not in there:
                yield seq, f"the idempotency key of call {call} is missing in the tables, on record it is 'executing'"
        yield from _compare_sessions(reader, sessions, open_sealed)
        yield from amounts.disagreements(reader, purged_through, now_ms)
    except (StoreError, TypeError, ValueError) as error:
        yield 0, f"the tables that calls leave behind cannot be read: {error}"


def _newest(reader: Reader) -> int:
    record = agreement.parsed(verify_reads.newest_body(reader))
    return _ms(cast("Json", record).get("timestamp")) or 0 if isinstance(record, dict) else 0


def _compare(recorded: _Key, row: KeyRow, *, complete: bool) -> Iterator[tuple[int, str]]:
    scope, call, state, expires_ms, tool, version, key, caller, input_hash, _ = row
    if recorded.state is None:
        if not recorded.seq and (complete or not isinstance(call, str)):
            yield 0, f"the idempotency key of call {call} is in the tables and on no record"
        return
    if recorded.state == "released":
        yield recorded.seq, f"the idempotency key of call {call} is {state!r} in the tables, on record it was released"
        return
    if state != recorded.state and not (state == "unknown" and recorded.state == "executing"):
        yield (
            recorded.seq,
            f"the idempotency key of call {call} is {state!r} in the tables, on record {recorded.state!r}",
        )
    row_facts = {"tool": tool, "version": version, "key": key, "caller": caller, "input_hash": input_hash}
    differ = [name for name, value in recorded.facts.items() if row_facts[name] != value]
    if differ:
        words = ", ".join(f"{name} is {row_facts[name]!r}, on record {recorded.facts[name]!r}" for name in differ)
        yield recorded.seq, f"the idempotency key of call {call} differs in the tables: {words}"
    elif recorded.scope is not None and scope != recorded.scope:
        yield recorded.seq, f"the idempotency key of call {call} is filed under another name than its record says"
    if recorded.until_ms is not None and not (
        type(expires_ms) is int and expires_ms >= recorded.until_ms - _MOMENTS_MS
    ):
        yield recorded.seq, f"the idempotency key of call {call} ends in the tables before its window does"


def _recorded_key(reader: Reader, call: str) -> _Key:
    recorded = _Key()
    for seq, kind, body in verify_reads.records_of_call(reader, call):
        record = agreement.parsed(body)
        if isinstance(record, dict):
            recorded.play(seq, kind, cast("Json", record))
    return recorded


@dataclass(frozen=True, slots=True)
class _Session:
    """The facts that the last record about a session states."""

    seq: int
    version: int
    digest: str | None


def _marked(reader: Reader, now_ms: int) -> tuple[set[str], dict[bytes, _Session]]:
    """Return the calls whose key may have to exist, and each session according to its last record."""
    wanted: set[str] = set()
    sessions: dict[bytes, _Session] = {}
    for seq, kind, call, body in verify_reads.records_of_keys_and_sessions(reader):
        record = agreement.parsed(body)
        if not isinstance(record, dict):
            continue
        known = cast("Json", record)
        version, made, window_s = known.get("sessionVersion"), _ms(known.get("timestamp")), known.get("keyWindowS")
        if kind != "intent" or (made is not None and isinstance(window_s, int) and made + window_s * 1000 > now_ms):
            wanted.add(call)
        if kind == "closed" and isinstance(version, int):
            row = sealed_digest(str(known.get("tenant")), str(known.get("callerId")), str(known.get("session", "")))
            sessions[row] = _Session(seq, version, known.get("sessionHash"))
    return wanted, sessions


def _compare_sessions(
    reader: Reader, recorded: dict[bytes, _Session], open_sealed: Open | None
) -> Iterator[tuple[int, str]]:
    there = verify_reads.has_sessions(reader)
    for row_id, session in recorded.items():
        row = verify_reads.session(reader, row_id) if there else None
        if row is None:
            yield (
                session.seq,
                f"the state of a session is missing in the tables, on record it has version {session.version}",
            )
            continue
        version, state = row
        if version != session.version:
            yield (
                session.seq,
                f"the state of a session has version {version!r} in the tables, on record {session.version}",
            )
        elif session.digest is not None:
            yield from _compare_state(session, state, row_id.hex(), open_sealed)


def _compare_state(session: _Session, state: Any, about: str, open_sealed: Open | None) -> Iterator[tuple[int, str]]:
    """Compare a session's state.

    A state in clear text comes from an older version; anybody could have put one there.
    """
    what = f"the state of a session with version {session.version}"
    try:
        text = state if isinstance(state, str) else _opened(state, "session", about, open_sealed)
    except Failure as failure:
        yield session.seq, f"{what} cannot be opened: {failure.message}"
        return
    if text is not None and digest(orjson.loads(text)) != session.digest:
        yield session.seq, f"{what} holds other values than it had on record"


def _compare_result(
    reader: Reader, recorded: _Key, call: str, stored: Any, open_sealed: Open | None
) -> Iterator[tuple[int, str]]:
    """Compare what a replay would answer with the digest of the result, or the code of the failure, on record."""
    if recorded.result is None and recorded.error is None:
        return
    try:
        outcome = _outcome(reader, call, stored, open_sealed)
    except Failure as failure:
        yield (
            recorded.seq,
            f"the stored result of the idempotency key of call {call} cannot be opened: {failure.message}",
        )
        return
    if outcome is None:
        return
    error, value = outcome
    if error != recorded.error or (error is None and value is not _GONE and digest(value) != recorded.result):
        yield recorded.seq, f"the idempotency key of call {call} has another result than is on record"


_GONE = object()


def _outcome(reader: Reader, call: str, stored: Any, open_sealed: Open | None) -> tuple[str | None, Any] | None:
    """Return the failure's code or the result of a key, `_GONE` for one that is no longer stored; None if unknown."""
    text = (
        stored
        if isinstance(stored, bytes) and stored.startswith(b"{")
        else _opened(stored, "outcome", call, open_sealed)
    )
    if text is None:
        return None
    outcome = cast("Json", decode(text))
    if "error" in outcome:
        return str(outcome["error"].get("code")), None
    ref = outcome["persistence"][1]
    if ref is None:
        return None, outcome["value"]
    row = verify_reads.payload(reader, ref)
    if row is None or row[0] is None:
        return None, _GONE
    body = row[0] if len(row[0]) == row[1] else _opened(row[0], "payload", ref, open_sealed)
    return None if body is None else (None, decode(bytes(body)))


def _opened(sealed: Any, purpose: str, about: str, open_sealed: Open | None) -> bytes | None:
    if not isinstance(sealed, bytes):
        raise Failure("E3604", "it is not what was stored")
    return None if open_sealed is None else open_sealed(sealed, purpose, about)


def _ms(timestamp: Any) -> int | None:
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000)
    except (TypeError, ValueError):
        return None
