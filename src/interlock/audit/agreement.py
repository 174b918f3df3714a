"""Checks that the tables from which authority is read still agree with the journal.

Identities, revocations and approvals are looked up in tables, and anybody who can write the file can write them. Each
of these acts is also a record of the chain, in the same transaction. The records are therefore replayed, and each row
must agree with the result: neither more, nor less, nor something else.

Records that retention removed cannot be replayed. For a row whose records may be gone, only the remaining ones are
checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.core.clock import iso
from interlock.core.record import dataclass
from interlock.store import verify_reads
from interlock.store.port import StoreError

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.store.port import Reader

_VOIDS = {"token.revoked": "jti", "key.revoked": "key", "identity.revoked": "did"}
_MOVES = {
    "approved": "APPROVED", "denied": "DENIED", "used": "USED", "voided": "VOID", "withdrawn": "VOID",
    "auto_denied": "AUTO_DENIED", "lapsed": "LAPSED",
}  # fmt: skip


@dataclass(slots=True)
class _Recorded:
    """The facts about one thing according to the records, the last of them, and whether one of them created it."""

    seq: int = 0
    whole: bool = False
    facts: Json = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class _Ledger:
    """The result of replaying the records."""

    identities: dict[str, _Recorded] = field(default_factory=dict[str, _Recorded])
    revocations: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    tickets: dict[str, _Recorded] = field(default_factory=dict[str, _Recorded])
    standings: dict[str, _Recorded] = field(default_factory=dict[str, _Recorded])
    purges: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    # Tickets that were used without an approval before, and where.
    unapproved: dict[str, int] = field(default_factory=dict[str, int])

    def play(self, seq: int, kind: str, ref: str, record: Json) -> None:
        act = str(record.get("act", ""))
        if kind == "purge":
            self.purges[f"{record.get('firstSeq')} to {record.get('lastSeq')}", str(record.get("hash"))] = seq
        elif kind == "pending" or "approvalTicketId" in record:
            self._play_ticket(seq, kind, act, record)
        elif kind == "approval":
            self._play_standing(seq, act, ref, record)
        elif act in _VOIDS:
            self.revocations.setdefault((_VOIDS[act], ref), seq)
            if act == "identity.revoked":  # perhaps an identity of another registry
                self._identity(seq, ref, state="revoked")
        elif act in ("identity.registered", "identity.updated"):
            names = ("name", "tenant", "trust", "groups")
            facts = {name: record[name] for name in names if name in record}
            self._identity(seq, ref, kind=record.get("identityKind"), state="active", **facts).whole = True

    def _identity(self, seq: int, did: str, **facts: Any) -> _Recorded:
        recorded = self.identities.setdefault(did, _Recorded())
        recorded.seq = seq
        recorded.facts |= facts
        return recorded

    def _play_ticket(self, seq: int, kind: str, act: str, record: Json) -> None:
        ticket = str(record.get("approvalTicketId"))
        recorded = self.tickets.setdefault(ticket, _Recorded())
        if kind == "pending":
            recorded.whole = True
            recorded.seq, recorded.facts["state"] = seq, "PENDING"
        elif act in _MOVES:
            if act == "used" and recorded.facts.get("state") != "APPROVED":
                self.unapproved[ticket] = seq
            recorded.seq, recorded.facts["state"] = seq, _MOVES[act]
            if act in ("approved", "denied"):
                recorded.facts |= {"digest": record.get("digest"), "resolved_by": record.get("by")}

    def _play_standing(self, seq: int, act: str, ref: str, record: Json) -> None:
        if not act.startswith("standing."):
            return
        recorded = self.standings.setdefault(ref, _Recorded())
        recorded.seq = seq
        if act == "standing.granted":
            recorded.whole = "bounds" in record  # the table dropped approvals that were granted without bounds
            names = ("tool", "versions", "caller", "uses", "expiresAt", "grantedBy")
            recorded.facts = {name: record[name] for name in names if name in record} | {"used": 0, "revoked": False}
        elif act == "standing.used":
            recorded.facts["used"] = recorded.facts.get("used", 0) + 1
        elif act == "standing.revoked":
            recorded.facts["revoked"] = True


def disagreements(reader: Reader, purged_through: int) -> Iterator[tuple[int, str]]:
    """Yield differences between tables and records: the place of the newest record about it, or 0, and a text."""
    ledger = _Ledger()
    for seq, kind, call, body in verify_reads.records_of_authority(reader):
        if isinstance(record := parsed(body), dict):
            ledger.play(seq, str(kind), str(call), cast("Json", record))
    complete = purged_through == 0
    for ticket, seq in ledger.unapproved.items():
        if complete or ledger.tickets[ticket].whole:
            yield seq, f"ticket `{ticket}` was used, and no approval of it is on record"
    try:
        yield from _compare("identity", ledger.identities, _identities(reader), complete)
        yield from _compare("ticket", ledger.tickets, _tickets(reader), complete)
        yield from _compare("standing approval", ledger.standings, _standings(reader), complete)
        yield from _compare_revocations(ledger, reader, complete)
        yield from _compare_segments(ledger, reader)
    except StoreError as error:
        yield 0, f"the tables that authority is read from cannot be read: {error}"


def _compare(
    what: str, recorded: dict[str, _Recorded], rows: Iterator[tuple[Any, Json]], complete: bool
) -> Iterator[tuple[int, str]]:
    present: set[Any] = set()
    for ref, row in rows:
        present.add(ref)
        expected = recorded.get(ref) if isinstance(ref, str) else None
        if expected is None:
            if complete or not isinstance(ref, str):
                yield 0, f"the {what} `{ref}` is in the tables and on no record"
            continue
        # Uses before the removed records are in the row alone.
        unknown = () if expected.whole or what != "standing approval" else ("used",)
        differ = [name for name, value in expected.facts.items() if name not in unknown and row.get(name) != value]
        if differ:
            differences = ", ".join(
                f"{name} is {row.get(name)!r}, on record {expected.facts[name]!r}" for name in differ
            )
            yield expected.seq, f"the {what} `{ref}` is another in the tables: {differences}"
    for ref in sorted(recorded.keys() - present):
        if recorded[ref].whole:
            yield recorded[ref].seq, f"the {what} `{ref}` is missing in the tables"


def _compare_revocations(ledger: _Ledger, reader: Reader, complete: bool) -> Iterator[tuple[int, str]]:
    present: set[tuple[Any, Any]] = set()
    for seq, kind, ref in verify_reads.revocations(reader):
        # The program reads on from the last number it saw, so a row without a number is never read.
        if type(seq) is int and seq > 0:
            present.add((kind, ref))
        if complete and (kind, ref) not in ledger.revocations:
            yield 0, f"the revocation of {kind} `{ref}` is in the tables and on no record"
    for kind, ref in sorted(ledger.revocations.keys() - present):
        yield ledger.revocations[kind, ref], f"the revocation of {kind} `{ref}` is missing in the tables"


def _compare_segments(ledger: _Ledger, reader: Reader) -> Iterator[tuple[int, str]]:
    present = {
        (f"{first} to {last}", hash_.hex() if isinstance(hash_, bytes) else "")
        for first, last, hash_ in verify_reads.segment_places(reader)
    }
    for purge in sorted(ledger.purges.keys() - present):
        yield ledger.purges[purge], f"the segment that stands for records {purge[0]} is missing or another"


# Rows


def _identities(reader: Reader) -> Iterator[tuple[Any, Json]]:
    for row in verify_reads.identities(reader):
        facts = {"kind": row.kind, "name": row.name, "tenant": row.tenant, "trust": row.trust, "state": row.state}
        yield row.did, {**facts, "groups": parsed(row.groups)}


def _tickets(reader: Reader) -> Iterator[tuple[Any, Json]]:
    for row in verify_reads.tickets(reader):
        yield row.id, {"state": row.state, "digest": row.digest, "resolved_by": row.resolved_by}


def _standings(reader: Reader) -> Iterator[tuple[Any, Json]]:
    for row in verify_reads.standings(reader):
        facts = {"tool": row.tool, "versions": row.versions, "caller": row.caller, "uses": row.uses, "used": row.used}
        expires = iso(row.expires_ms) if type(row.expires_ms) is int else None
        revoked = row.revoked_ms is not None
        yield row.id, {**facts, "expiresAt": expires, "grantedBy": row.granted_by, "revoked": revoked}


def parsed(value: Any) -> Any:
    """Parse a stored JSON text; None if it is invalid."""
    try:
        return orjson.loads(value)
    except (orjson.JSONDecodeError, TypeError):
        return None
