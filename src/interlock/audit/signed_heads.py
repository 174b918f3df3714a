"""Signed heads: those of removed segments, anchors in the database and in the file beside it, and noted heads."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from interlock.audit.chain_verdict import ChainFault, Examination, FaultList, records_words
from interlock.core.clock import END_MS
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import last_head, verify_reads
from interlock.store.last_head import GENESIS, SignedHead, anchor_line
from interlock.store.signing import signed_by

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.port import Reader


# Anchors that a crash kept from the file were made shortly before it.
_LOST_AT_ONCE_MS = 600_000


class Signatures:
    """Checks signatures with the auditor's key, or with another one that is loaded when it is first needed."""

    def __init__(self, given: bytes | None, look: Callable[[], bytes | None]) -> None:
        self.given = given
        self._look = look
        self._loaded = False
        self._key: bytes | None = None
        self._key_id = ""

    def fault(self, kind: str, head: SignedHead) -> str | None:
        """Describe what is wrong with a signed head; None if nothing is, or if there is no key to check it."""
        if not self._loaded:
            self._loaded = True
            self._key = self.given or self._look()
            self._key_id = hashlib.sha256(self._key or b"").hexdigest()[:16]
        if self._key is None:
            return None
        if head.key_id != self._key_id:
            return f"signed with the key `{head.key_id}`, not with `{self._key_id}`"
        if not signed_by(self._key, kind, head.seq, head.hash, head.at_ms, head.signature):
            return "its signature does not verify"
        return None


def key_of(home: Home, faults: FaultList) -> bytes | None:
    """Load the public key of a home; an unreadable one is a fault."""
    try:
        key = bytes.fromhex((home.keys / "journal.pub").read_text(encoding="ascii").strip())
    except FileNotFoundError:
        faults.note(0, "the public key journal.pub is missing; signatures cannot be checked")
        return None
    except (OSError, ValueError):
        key = b""
    if len(key) != 32:
        faults.note(0, "the public key journal.pub is damaged; signatures cannot be checked")
        return None
    return key


def _signed_head(seq: Any, hash_: Any, at_ms: Any, key_id: Any, signature: Any) -> SignedHead | None:
    """Read a row as a signed head; None if a column has an invalid value."""
    if type(seq) is not int or type(at_ms) is not int or type(key_id) is not bytearray:
        return None
    if type(hash_) is not bytes or type(signature) is not bytes or not 0 <= at_ms < END_MS:
        return None
    return SignedHead(seq, hash_, at_ms, key_id.decode("utf-8", "replace"), signature)


def check_segments(reader: Reader, signatures: Signatures, examined: Examination) -> None:
    """Check what retention removed: signed heads, each beginning where the one before ended."""
    for *row, first_seq in verify_reads.segments(reader):
        head, last_seq = _signed_head(*row), row[0]
        if head is None or last_seq <= examined.seq:
            examined.in_segments.note(max(examined.seq, 1), f"the purged segment ending at `{last_seq}` is damaged")
            continue
        if first_seq != examined.seq + 1:
            examined.in_segments.note(last_seq, f"the purged segment does not begin at {examined.seq + 1}")
        if (wrong := signatures.fault("segment", head)) is not None:
            examined.in_segments.note(last_seq, f"the purged segment: {wrong}")
        examined.seq, examined.head = head.seq, head.hash
        examined.segment_heads[head.seq] = head.hash
    examined.purged_through = examined.seq


def check_anchors(reader: Reader, signatures: Signatures, witness: AnchorsFile | None, examined: Examination) -> None:
    """Check every anchor, in the database and in the file: signed, and in agreement with the record it names."""
    stored: dict[int, SignedHead] = {}
    heads: list[SignedHead] = []
    for row in verify_reads.anchors(reader):
        head = _signed_head(*row)
        if head is None:
            examined.in_anchors.note(row[0] if type(row[0]) is int else 0, "the anchor is damaged")
            continue
        stored[head.seq] = head
        heads.append(head)
    absent: list[int] = []
    for line in () if witness is None else witness.heads:
        if line.seq not in stored:
            absent.append(line.seq)
            heads.append(line)
        elif stored[line.seq] != line:
            heads.append(line)
    lost = set(absent)
    examined.anchors = len(stored) + len(lost)
    if witness is not None:
        for what in witness.wants(list(stored.values())):
            examined.in_general.note(0, what)
    if not heads and examined.records and signatures.given:
        examined.in_general.note(0, "there is no signed head, so the public key given proves nothing")
    for head in sorted(heads, key=lambda head: head.seq):
        wrong = signatures.fault("head", head)
        if wrong is not None:
            examined.in_anchors.note(head.seq, f"the anchor: {wrong}")
            continue
        if examined.newest is None or head.seq >= examined.newest.seq:
            examined.newest = head
        if head.seq > examined.seq:
            continue  # the cut is reported once, below
        if head.seq in lost:
            examined.in_anchors.note(head.seq, "an anchor in the file is missing in the database")
        if (hash_ := _hash_at(reader, head.seq, examined)) is not None and hash_ != head.hash:
            examined.in_anchors.note(head.seq, "the record is not the one that was anchored")
    if examined.newest is not None and examined.newest.seq > examined.seq:
        gone = records_words(examined.seq + 1, examined.newest.seq)
        examined.in_anchors.faults.insert(
            0, ChainFault(examined.seq + 1, f"{gone} missing: a signed anchor names the last")
        )


def check_known_head(reader: Reader, known: tuple[int, bytes], examined: Examination) -> None:
    """Check the head that an auditor noted earlier; if it has been purged since, its signed segment vouches for it."""
    seq, known_hash = known
    if seq > examined.seq:
        gone = records_words(examined.seq + 1, seq)
        examined.in_anchors.faults.insert(
            0, ChainFault(examined.seq + 1, f"{gone} missing: the known head names the last")
        )
    elif (hash_ := _hash_at(reader, seq, examined)) is not None and hash_ != known_hash:
        examined.in_anchors.faults.insert(0, ChainFault(seq, "the record is not the one of the known head"))


def _hash_at(reader: Reader, seq: int, examined: Examination) -> bytes | None:
    """Return the hash that a record must have; None if it was purged (or is missing, which the chain itself shows)."""
    if seq in examined.segment_heads:
        return examined.segment_heads[seq]
    if seq <= examined.purged_through:
        return GENESIS if seq == 0 else None
    return verify_reads.hash_of(reader, seq)


@dataclass(frozen=True, slots=True)
class LastHead:
    """The signed head that is stored beside the keys. `fault`: why it cannot be used."""

    head: SignedHead | None = None
    fault: str | None = None

    @classmethod
    def of(cls, home: Home) -> LastHead:
        try:
            return cls(last_head.read(home))
        except Failure as failure:
            return cls(fault=failure.message)


def check_last_head(reader: Reader, signatures: Signatures, stored: LastHead | None, examined: Examination) -> None:
    """Check that the journal goes through the head stored beside the keys, and that an anchor in the
    database names it.
    """
    last = None if stored is None else stored.head
    note = examined.in_general.note
    if stored is not None and stored.fault is not None:
        note(0, stored.fault)
    elif stored is not None and last is None and examined.records and last_head.expected(reader):
        note(0, "keys/journal.head is missing, though this data directory had one")
    if last is not None and (wrong := signatures.fault("head", last)) is not None:
        note(0, f"keys/journal.head: {wrong}")
    elif last is not None and last.seq > examined.seq:
        gone = records_words(examined.seq + 1, last.seq)
        examined.in_anchors.note(examined.seq + 1, f"{gone} missing: keys/journal.head names the last")
    elif last is not None:
        if (hash_ := _hash_at(reader, last.seq, examined)) is not None and hash_ != last.hash:
            examined.in_anchors.note(last.seq, "the record is not the one that keys/journal.head names")
        if last.seq and not verify_reads.has_anchor(reader, last.seq):
            examined.in_anchors.note(last.seq, "its anchor was removed from the database: keys/journal.head names it")


def check_unsigned(reader: Reader, stored: LastHead | None, examined: Examination) -> None:
    """Check the records behind the newest signature: no more than a killed process leaves."""
    ends = last_head.Ends((examined.seq, examined.head), examined.newest, None if stored is None else stored.head)
    if (what := last_head.unsigned_fault(reader, ends)) is not None:
        examined.in_general.note(0, what)


@dataclass(frozen=True, slots=True)
class AnchorsFile:
    """The anchors file.

    `unread`: the lines that hold no signed head, with their numbers; one that does not end as a crash ends a line keeps
    its newline. `unreadable`: why there is nothing to read. `missing`: the home has a key and no such file. `partial`:
    the store has several data directories, and each has the anchors that its own processes made.
    """

    heads: tuple[SignedHead, ...] = ()
    unread: tuple[tuple[int, bytes], ...] = ()
    unreadable: str | None = None
    missing: bool = False
    partial: bool = False

    @classmethod
    def of(cls, home: Home) -> AnchorsFile:
        try:
            lines = home.anchors.read_bytes().split(b"\n")
        except FileNotFoundError:
            return cls(missing=home.keys.exists() and any(home.keys.glob("journal.*")))
        except OSError as error:
            return cls(unreadable=f"the anchors file cannot be read: {error.strerror}")
        heads: list[SignedHead] = []
        unread: list[tuple[int, bytes]] = []
        for number, line in enumerate(lines, 1):
            if (head := _line(line)) is not None:
                heads.append(head)
            elif line:
                # A whole line has a newline of its own, and the next one another in front.
                cut = number == len(lines) or lines[number]
                unread.append((number, line if cut else line + b"\n"))
        return cls(tuple(heads), tuple(unread), partial=not home.near)

    def wants(self, stored: list[SignedHead]) -> Iterator[str]:
        """Yield what is missing in this file, given the anchors in the database, in their order.

        The file exists before the first anchor, and each anchor is written to it right after it is in the database. A
        crash can lose one, or the newest few; only manipulation makes a file that begins later or ended long ago.
        """
        if self.unreadable is not None:
            yield self.unreadable
            return
        damaged = list(self._damaged(stored))
        if damaged:
            yield from (f"line {number} of the anchors file is damaged" for number in damaged)
            return
        if self.partial:
            return
        held = {head.seq for head in self.heads}
        if self.missing or (len(stored) > 1 and not held):
            yield "the anchors file is missing or empty: that the end was cut back to an earlier anchor would not show"
        elif stored and held and not held.intersection(head.seq for head in stored[:2]):
            yield f"the anchors file lacks the first anchors, from record {stored[0].seq} on"
        newest = max(held, default=sys.maxsize)
        later = [head.at_ms for head in stored if head.seq > newest]
        if later and max(later) - min(later) > _LOST_AT_ONCE_MS:
            yield f"the anchors file ends with record {newest}: {len(later):,} later anchors are missing in it"

    def _damaged(self, stored: list[SignedHead]) -> Iterator[int]:
        """Yield the lines that only manipulation can have produced.

        A power cut or a full disk can leave the beginning of a line. INVARIANT: it passes only as the beginning of an
        anchor that the database holds and the rest of the file does not. That one is verified with the others, so
        nothing is hidden by tearing its line.
        """
        if not self.unread:
            return
        held = set(self.heads)
        lost = [anchor_line(*astuple(head)) for head in stored if head not in held]
        for number, line in self.unread:
            if not any(whole.startswith(line) for whole in lost):
                yield number


def _line(line: bytes) -> SignedHead | None:
    head = last_head.read_line(line)
    return head if head is not None and 0 <= head.at_ms < END_MS else None
