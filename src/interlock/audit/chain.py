"""Proof that the journal is complete: every record where it was written, none changed, none missing.

Theory of operation. Each record's hash covers the hash before it, so a change, a gap, an insertion or a swap breaks the
chain where it happened. A chain alone cannot show that its end was cut off or that all of it was rewritten; signed
heads can: anchors in the database, the same anchors in a file beside it, and any head that an auditor noted earlier.
Signed segments stand for what retention removed, and the chain continues from the last of them.

Three more checks: the ledger has its original layout, so that everybody reads the rows that were followed here
(`store.layout`); the tables beside it, from which authority is read and which calls leave behind, agree with the
records (`agreement`, `outcomes`); and the anchors file is where it belongs. An auditor who was given the database alone
says so, and the verdict repeats it.

The file is opened for reading only and read in one transaction, so a copy works, and so does the file of a running
program. No stored value is trusted: a row may hold any type, any bytes, any number.

Limit: records after the newest anchor are chained but not signed yet. `ChainVerdict.anchored_through` says where that
begins; a journal that was closed properly is anchored to its end.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from interlock.audit import agreement, outcomes
from interlock.core.clock import END_MS, iso
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import last_head, layout, verify_reads
from interlock.store.compared import COMPARED
from interlock.store.last_head import GENESIS, SignedHead, anchor_line
from interlock.store.sealing import Box, is_sealed, key_id_of
from interlock.store.signing import signed_by

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.store.home import Home
    from interlock.store.port import Reader

MAX_FAULTS = 20
_PROGRESS_EVERY = verify_reads.AT_A_TIME * 500
# Anchors that a crash kept from the file were made shortly before it.
_LOST_AT_ONCE_MS = 600_000


@dataclass(frozen=True, slots=True)
class ChainFault:
    """A difference from what was written. `seq` 0: not about one record."""

    seq: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainVerdict:
    """The result of the verification."""

    intact: bool
    records: int
    purged_through: int
    head: tuple[int, str]
    anchors: int
    anchored_through: int
    last_anchor_ms: int | None
    anchors_file: bool
    faults: tuple[ChainFault, ...]
    seconds: float

    def document(self) -> Json:
        seq, digest = self.head
        return {
            "intact": self.intact,
            "records": self.records,
            "purged_through": self.purged_through,
            "head": {"seq": seq, "hash": digest},
            "anchors": self.anchors,
            "anchored_through": self.anchored_through,
            "last_anchor_at": None if self.last_anchor_ms is None else iso(self.last_anchor_ms),
            "anchors_file": self.anchors_file,
            "faults": [{"seq": fault.seq, "what": fault.what} for fault in self.faults],
            "seconds": self.seconds,
        }


def verify(
    home: Home,
    *,
    public_key: bytes | None = None,
    known_head: tuple[int, bytes] | None = None,
    database_only: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ChainVerdict:
    """Verify the chain of a home, and report where it is broken.

    E3804 if there is no readable database of ours, E3803 if a full disk keeps it from being read.

    `public_key` is the one the auditor trusts, in place of the one in the home. `known_head` is a head seen earlier;
    the chain must still go through it. `database_only`: the database came without the rest of its home, and the anchors
    file is left out. `progress` receives the number of records read.
    """
    began = time.monotonic()
    if not home.made:
        raise Failure("E3804", "there is no database in this data directory")
    if public_key is not None and len(public_key) != 32:
        raise Failure("E3004", "the public key given is not an Ed25519 key of 32 bytes")
    # An anchor is in the database before it is in a file, so the files are read first.
    witness = None if database_only else _Witness.of(home)
    last = None if database_only else _LastHead.of(home)
    open_sealed = None if database_only else _opener(home)
    examine = partial(_examine, home, witness, last, public_key, known_head, progress, open_sealed)
    before = verify_reads.stamp(home.database) if home.near else None
    if before is None or before.beside:
        examined = examine(immutable=False)
    else:
        # No process has the file open. Reading it as immutable leaves no files beside it and works on read-only media;
        # if another process wrote meanwhile, the result is discarded and the file is read again.
        try:
            examined = examine(immutable=True)
        except Failure:
            if verify_reads.stamp(home.database) == before:
                raise
            examined = None
        if examined is None or verify_reads.stamp(home.database) != before:
            examined = examine(immutable=False)
    return examined.verdict(time.monotonic() - began)


# Parts of an examination


@dataclass(slots=True)
class _Faults:
    """The first faults of one kind of check. Each check meets its own in order, so the first overall are kept."""

    faults: list[ChainFault] = field(default_factory=list[ChainFault])

    def note(self, seq: int, what: str) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(ChainFault(seq, what))


@dataclass(slots=True)
class Examination:
    """The state and the findings of an examination."""

    in_segments: _Faults = field(default_factory=_Faults)
    in_records: _Faults = field(default_factory=_Faults)
    in_anchors: _Faults = field(default_factory=_Faults)
    in_general: _Faults = field(default_factory=_Faults)
    records: int = 0
    segment_heads: dict[int, bytes] = field(default_factory=dict[int, bytes])
    purged_through: int = 0
    seq: int = 0
    head: bytes = GENESIS
    anchors: int = 0
    newest: SignedHead | None = None
    anchors_file: bool = True

    def verdict(self, seconds: float) -> ChainVerdict:
        parts = (self.in_segments, self.in_records, self.in_anchors)
        faults = sorted((fault for part in parts for fault in part.faults), key=lambda fault: fault.seq)
        faults = [*faults, *self.in_general.faults][:MAX_FAULTS]
        newest = self.newest
        return ChainVerdict(
            intact=not faults,
            records=self.records,
            purged_through=self.purged_through,
            head=(self.seq, self.head.hex()),
            anchors=self.anchors,
            anchored_through=0 if newest is None else newest.seq,
            last_anchor_ms=None if newest is None else newest.at_ms,
            anchors_file=self.anchors_file,
            faults=tuple(faults),
            seconds=seconds,
        )


def _examine(
    home: Home,
    witness: _Witness | None,
    last: _LastHead | None,
    public_key: bytes | None,
    known_head: tuple[int, bytes] | None,
    progress: Callable[[int], None] | None,
    open_sealed: outcomes.Open | None,
    *,
    immutable: bool,
) -> Examination:
    examined = Examination(anchors_file=witness is not None)
    note = examined.in_general.note
    with verify_reads.opened(home, immutable=immutable) as reader:
        signatures = Signatures(public_key, partial(_key_of, home, examined.in_general))
        for what in layout.departures(reader):
            note(0, what)
        _check_segments(reader, signatures, examined)
        _check_records(reader, examined, progress)
        _check_anchors(reader, signatures, witness, examined)
        _check_last_head(reader, signatures, last, examined)
        if public_key is not None or (home.keys / "journal.pub").exists():
            _check_unsigned(reader, last, examined)
        if known_head is not None:
            _check_known_head(reader, known_head, examined)
        for what in layout.contradictions(reader, (*layout.LEDGER, *COMPARED)):
            note(0, what)
        for seq, what in agreement.disagreements(reader, examined.purged_through):
            note(seq, what)
        for seq, what in outcomes.disagreements(reader, examined.purged_through, home.now_ms(reader), open_sealed):
            note(seq, what)
    return examined


def _opener(home: Home) -> outcomes.Open | None:
    """Make the function that opens sealed values of this home; None if its sealing keys are not in a file or
    unreadable.
    """
    box = Box(home.keys)
    try:
        ids = box.ids()
    except Failure:
        return None  # `interlock doctor` names what is wrong with them

    def open_sealed(sealed: bytes, purpose: str, about: str) -> bytes | None:
        lost = is_sealed(sealed) and key_id_of(sealed) not in ids
        return None if lost else box.open(sealed, purpose=purpose, about=about)

    return open_sealed if ids else None


# Records


def _check_records(reader: Reader, examined: Examination, progress: Callable[[int], None] | None) -> None:
    """Follow the chain from the last purged record to the end."""
    check = Follower(examined)
    try:
        for rows in verify_reads.records(reader):
            check.follow(rows)
            examined.records += len(rows)
            if progress is not None and examined.records % _PROGRESS_EVERY == 0:
                progress(examined.records)
    except verify_reads.UNREADABLE as error:
        what = f"the database cannot be read from here on: {verify_reads.reason(error)}"
        examined.in_records.note(examined.seq + 1, what)
    if progress is not None:
        progress(examined.records)


class Follower:
    """The inner loop. Where a link is broken it notes the fault and continues from the row.

    Whether a row's columns repeat its record could be checked by parsing the record, which costs more than all other
    checks together. The records of ordinary calls begin with the two names, so only their beginning is compared.
    """

    def __init__(self, examined: Examination) -> None:
        self._examined = examined

    def follow(self, rows: Iterable[Any]) -> None:
        examined, sha256 = self._examined, hashlib.sha256
        seq, head = examined.seq, examined.head
        for at, kind, call, body, stored in rows:
            if (
                at != seq + 1
                or type(body) is not bytes
                or type(stored) is not bytes
                or (computed := sha256(head + _EIGHT_BYTES(at) + body).digest()) != stored
            ):
                seq, head = self._broken(seq, head, at, kind, call, body, stored)
                continue
            seq, head = at, computed
            if (
                type(kind) is bytearray
                and type(call) is bytearray
                and body.startswith(b'{"kind":"' + kind + b'","call":"' + call + b'"')
                and kind.isalpha()  # a value with a quote or an escape could match more than one value
                and call.isalnum()
            ):
                continue
            if not _names_agree(kind, call, body):
                examined.in_records.note(at, "the row names another kind or call than its record")
        examined.seq, examined.head = seq, head

    def _broken(
        self, seq: int, head: bytes, at: Any, kind: Any, call: Any, body: Any, stored: Any
    ) -> tuple[int, bytes]:
        """Describe what is wrong with a row, and return where to continue."""
        note = self._examined.in_records.note
        if type(at) is int and at <= self._examined.purged_through:
            note(at, "a record lies before the start of the chain")
            return seq, head
        if type(at) is not int or at <= seq:
            note(seq + 1, "a record has no place of its own in the sequence")
            return seq, head
        gap = at != seq + 1
        if gap:
            note(seq + 1, f"{records_words(seq + 1, at - 1)} missing")
        if type(body) is not bytes or type(stored) is not bytes:
            note(at, "the record is not stored as bytes")
            return at, stored if type(stored) is bytes else head
        # After a gap there is nothing to link to: the content of the record can be checked, its place cannot.
        if not gap:
            note(at, "the record does not fit its hash and the record before it")
        elif not _names_agree(kind, call, body):
            note(at, "the row names another kind or call than its record")
        return at, stored


_EIGHT_BYTES = struct.Struct(">Q").pack


def _names_agree(kind: Any, call: Any, body: bytes) -> bool:
    if type(kind) is not bytearray or type(call) is not bytearray:
        return False
    try:
        record = orjson.loads(body)
        return record["kind"].encode() == kind and record["call"].encode() == call
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError, UnicodeEncodeError):
        return False


# Signed heads


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


def _key_of(home: Home, faults: _Faults) -> bytes | None:
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


def _check_segments(reader: Reader, signatures: Signatures, examined: Examination) -> None:
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


def _check_anchors(reader: Reader, signatures: Signatures, witness: _Witness | None, examined: Examination) -> None:
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


def _check_known_head(reader: Reader, known: tuple[int, bytes], examined: Examination) -> None:
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
class _LastHead:
    """The signed head that is stored beside the keys. `fault`: why it cannot be used."""

    head: SignedHead | None = None
    fault: str | None = None

    @classmethod
    def of(cls, home: Home) -> _LastHead:
        try:
            return cls(last_head.read(home))
        except Failure as failure:
            return cls(fault=failure.message)


def _check_last_head(reader: Reader, signatures: Signatures, stored: _LastHead | None, examined: Examination) -> None:
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


def _check_unsigned(reader: Reader, stored: _LastHead | None, examined: Examination) -> None:
    """Check the records behind the newest signature: no more than a killed process leaves."""
    ends = last_head.Ends((examined.seq, examined.head), examined.newest, None if stored is None else stored.head)
    if (what := last_head.unsigned_fault(reader, ends)) is not None:
        examined.in_general.note(0, what)


@dataclass(frozen=True, slots=True)
class _Witness:
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
    def of(cls, home: Home) -> _Witness:
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


def records_words(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"records {first} to {last} are"
