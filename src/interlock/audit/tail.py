"""Acceptance of an unsigned tail: records that a person knows to be genuine, though Interlock cannot prove it.

A home with more unsigned records than a killed process leaves is not opened (E3804). That can be a false alarm, for
example after a clock that was wrong or a database that was repaired. A person who has examined it and who holds the
signing key can accept the tail. The act is a record with the person, the reason and the records that it is about, and
it is signed in the same transaction. Only the tail can be accepted: a journal with any other fault stays refused.
"""

from __future__ import annotations

from collections import Counter

import orjson

from interlock.audit.chain import verify
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.store import last_head, ledger, records
from interlock.store.administration import administered, anchor_head, writing
from interlock.store.home import Home
from interlock.store.port import Reader
from interlock.store.signing import Signer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The records behind the newest signature. `fault`: why they are refused; None if they are not."""

    first: int
    last: int
    hash: bytes
    kinds: dict[str, int]
    earliest: str | None
    latest: str | None
    fault: str | None

    @property
    def records(self) -> int:
        return self.last - self.first + 1

    def document(self) -> Json:
        return {
            "first": self.first,
            "last": self.last,
            "records": self.records,
            "hash": self.hash.hex(),
            "kinds": self.kinds,
            "earliest": self.earliest,
            "latest": self.latest,
            "fault": self.fault,
        }


def unsigned_tail(home: Home) -> Tail:
    """Return the tail that could be accepted.

    E3804 if the journal has another fault, which cannot be accepted. Blocks.
    """
    verdict = verify(home)
    with administered(home) as connection:
        tail = _tail(connection, last_head.ends(connection, last_head.read(home)))
    others = [fault for fault in verdict.faults if fault.what != tail.fault]
    if others:
        where = f"record {others[0].seq}: " if others[0].seq else ""
        words = f"the tail cannot be accepted, because the journal has another fault: {where}{others[0].what}"
        raise Failure("E3804", words, resolution=last_head.EVIDENCE)
    return tail


def accept(home: Home, tail: Tail, *, reason: str, by: str, now_ms: int | None = None) -> int:
    """Sign a tail with a record of who accepted it and why. Returns the place of that record.

    E3804 without the home's own signing key, E3410 if the journal has changed since the tail was examined. Blocks.
    The record is of the time `now_ms`, by default that of the store.
    """
    with administered(home) as connection:
        now_ms = home.now_ms(connection) if now_ms is None else now_ms
        signer = _signer(home, connection)
        with writing(connection, now_ms) as transaction:
            if transaction.head != (tail.last, tail.hash):
                raise Failure("E3410", "the journal has changed meanwhile; look at the tail again", retry_after_ms=100)
            facts = {"act": "tail.accepted", "by": by, "reason": reason, **tail.document()}
            transaction.append("signing", "journal", records.plain("signing", "journal", now_ms, **facts))
            line = anchor_head(transaction, signer)
    last_head.note_anchor(home, line)
    return tail.last + 1


def _signer(home: Home, reader: Reader) -> Signer:
    """Load the home's signing key; E3804 if it is missing, or is not the one that has signed until now."""
    signer, signed = Signer(home.keys), last_head.ends(reader, last_head.read(home)).signed
    if not (home.keys / "journal.ed25519").exists():
        raise Failure(
            "E3804", "the tail can be accepted only with the signing key of the data directory, keys/journal.ed25519"
        )
    signer.check(None if signed is None else signed.key_id)
    return signer


def _tail(reader: Reader, ends: last_head.Ends) -> Tail:
    first, last = ends.head[0] - ends.unsigned + 1, ends.head[0]
    kinds: Counter[str] = Counter()
    times: list[str] = []
    for kind, body in ledger.from_place(reader, first):
        kinds[str(kind)] += 1
        try:
            made = orjson.loads(body)["timestamp"]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(made, str):
            times.append(made)
    return Tail(
        first=first,
        last=last,
        hash=ends.head[1],
        kinds=dict(sorted(kinds.items())),
        earliest=min(times, default=None),
        latest=max(times, default=None),
        fault=last_head.unsigned_fault(reader, ends),
    )
