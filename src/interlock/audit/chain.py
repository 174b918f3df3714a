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
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from interlock.audit import agreement, outcomes
from interlock.audit.chain_verdict import ChainVerdict, Examination, records_words
from interlock.audit.signed_heads import (
    AnchorsFile,
    LastHead,
    Signatures,
    check_anchors,
    check_known_head,
    check_last_head,
    check_segments,
    check_unsigned,
    key_of,
)
from interlock.core.errors import Failure
from interlock.store import layout, verify_reads
from interlock.store.compared import COMPARED
from interlock.store.sealing import Box, is_sealed, key_id_of

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.port import Reader

_PROGRESS_EVERY = verify_reads.AT_A_TIME * 500


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
    witness = None if database_only else AnchorsFile.of(home)
    last = None if database_only else LastHead.of(home)
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


def _examine(
    home: Home,
    witness: AnchorsFile | None,
    last: LastHead | None,
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
        signatures = Signatures(public_key, partial(key_of, home, examined.in_general))
        for what in layout.departures(reader):
            note(0, what)
        check_segments(reader, signatures, examined)
        _check_records(reader, examined, progress)
        check_anchors(reader, signatures, witness, examined)
        check_last_head(reader, signatures, last, examined)
        if public_key is not None or (home.keys / "journal.pub").exists():
            check_unsigned(reader, last, examined)
        if known_head is not None:
            check_known_head(reader, known_head, examined)
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
