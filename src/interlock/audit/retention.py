"""Retention of records: they are removed from the start of the chain, after their term, leaving a signed head.

Reads have one term, everything else another, between one and seven years. A purge removes records only as long as each
is past its own term; the first that is not ends it, whatever lies behind. Removed records leave a segment: where it
began and ended, and the signed hash it ended with, from which the rest of the chain still verifies. Segment, removal, a
record of the purge and an anchor over that record are one transaction.

The running program has no right to delete from the ledger. A purge is an administrative act and opens a connection of
its own; even there a trigger prevents the removal of anything that no segment accounts for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import administration, payloads, records, verify_reads
from interlock.store.administration import Administration, administered, anchor_head, give_back
from interlock.store.inspection import opened
from interlock.store.last_head import SignedHead, note_anchor
from interlock.store.signing import Signer

if TYPE_CHECKING:
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.store.port import Reader, Store, Transaction, Unit

MIN_YEARS, MAX_YEARS = 1, 7
# One transaction removes at most this much, followed by a pause, so that nobody waits long for the file.
SEGMENT_RECORDS = 2_000
PAYLOADS_AT_ONCE = 100
PAYLOAD_BYTES_AT_ONCE = 4 * 2**20
PIECES_AT_ONCE = 4
PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the chain that was removed, and the hash it ended with."""

    first_seq: int
    last_seq: int
    hash: bytes

    @property
    def records(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The minimum number of years that each class of record is kept."""

    reads_years: int
    others_years: int

    def __post_init__(self) -> None:
        # INVARIANT: no term is shorter than a year or longer than seven, however the settings were made.
        for years in (self.reads_years, self.others_years):
            if not MIN_YEARS <= years <= MAX_YEARS:
                raise Failure("E3004", f"records are kept between {MIN_YEARS} and {MAX_YEARS} years, not `{years}`")

    @classmethod
    def of(cls, settings: Settings) -> Terms:
        return cls(reads_years=settings.retention_years, others_years=settings.retention_years_writes)


def due(
    home: Home, settings: Settings, *, now_ms: int, through: int | None = None, before_ms: int | None = None
) -> tuple[Segment, ...]:
    """Return the segments that a purge would remove, without removing them. Arguments as for `purge`. Blocks."""
    with opened(home) as reader:
        purged = administration.purged_through(reader)
        limit = through or administration.last_record(reader)
        cutoffs = _Cutoffs.at(Terms.of(settings), now_ms).before(before_ms)
        return tuple(_due(reader, cutoffs, purged, limit))


def purge(
    home: Home,
    settings: Settings,
    *,
    now_ms: int,
    by: str,
    through: int | None = None,
    before_ms: int | None = None,
    progress: Callable[[int], None] | None = None,
    credential: str = "",
) -> tuple[Segment, ...]:
    """Remove what is past its term from the start of the chain; returns the removed segments, none if nothing is due.

    `through` requests everything up to a record, and is refused (E3411) if something there is still in its term.
    `before_ms` keeps what was made later. A chain that does not verify is not purged (E3804): that would remove the
    evidence. Where the settings name an archive, the records are written there first, with `credential` or that of the
    environment; if that fails, nothing is removed. Blocks, with pauses in which others write; run it in a thread.
    `progress` receives the number of records removed.
    """
    from interlock.audit.archiving import archive_records
    from interlock.audit.chain import verify

    verdict = verify(home)
    if not verdict.intact:
        fault = verdict.faults[0]
        where = f"the chain is broken at record {fault.seq}: " if fault.seq else ""
        raise Failure("E3804", f"nothing was purged: {where}{fault.what}")
    with administered(home) as connection:
        limit = verdict.head[0] if through is None else through
        cutoffs = _Cutoffs.at(Terms.of(settings), now_ms).before(before_ms)
        with opened(home) as reader:
            segments = list(_due(reader, cutoffs, verdict.purged_through, limit))
        last = segments[-1].last_seq if segments else verdict.purged_through
        if through is not None and last < through:
            raise Failure("E3411", f"nothing was purged: record {last + 1} is still in its term or does not exist")
        signer = Signer(home.keys)
        archive = ""
        if segments and settings.archive_to:
            end = segments[-1].last_seq, segments[-1].hash
            archive = archive_records(home, settings.archive_to, end, now_ms=now_ms, credential=credential)
        for segment in segments:
            _remove(connection, home, signer, segment, now_ms=now_ms, by=by, archive=archive)
            if progress is not None:
                progress(segment.last_seq - verdict.purged_through)
            time.sleep(PAUSE_S)
    return tuple(segments)


def shrink(home: Home, *, rewrite: bool = False) -> int:
    """Return the pages that a purge left empty to the disk; returns by how many bytes the file shrank. Blocks.

    A few pages at a time, with pauses in which others write. A database of an earlier version must be rewritten once
    for that, which blocks every writer: only with `rewrite`, when no other process runs on the home. Otherwise the file
    keeps its size, and its empty pages are reused.
    """
    if not home.near:
        return 0  # a server uses them again by itself
    before = home.database.stat().st_size
    with administered(home) as connection:
        if administration.can_give_back(connection):
            while _give_back(connection):
                time.sleep(PAUSE_S)
        elif rewrite:
            administration.rewrite(connection)
        administration.apply_log(connection)
    return max(before - home.database.stat().st_size, 0)


@dataclass(frozen=True, slots=True)
class Expired:
    """The number of expired large results, and the place up to which all are: the next slice begins there."""

    payloads: int
    place: tuple[int, str]


def expire_slice(after: tuple[int, str] = (-1, "")) -> Unit[Expired | None]:
    """Unit that removes the content of some expired large results, in order of expiry; None if there are no more.

    The rows stay and say that the content is gone. A slice is bounded in rows and bytes, so that other writers wait for
    milliseconds: emptying a row frees and logs each of its pages.
    """

    def unit(transaction: Transaction) -> Expired | None:
        taken, place, size = 0, after, 0
        for ref, its_size, expires_ms in payloads.expiring(transaction, transaction.now_ms, after, PAYLOADS_AT_ONCE):
            if taken and size + its_size > PAYLOAD_BYTES_AT_ONCE:
                break
            payloads.expire(transaction, ref)
            taken, place, size = taken + 1, (expires_ms, ref), size + its_size
        return Expired(taken, place) if taken else None

    return unit


async def expire_payloads(journal: Store, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> int:
    """Remove the content of all expired large results, a slice at a time with pauses; returns their number."""
    count, place = 0, (-1, "")
    while (slice_ := await journal.commit(expire_slice(place))) is not None:
        count, place = count + slice_.payloads, slice_.place
        await pause(PAUSE_S)
    removed = await remove_pieces(journal, pause)
    while (count or removed) and journal.leaves_pages and await journal.commit(give_back):
        await pause(PAUSE_S)
    return count


async def remove_pieces(journal: Store, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> int:
    """Remove the pieces of large results that nothing needs any more, a few at a time; returns their number."""
    count = 0
    while await journal.read(payloads.has_released):
        count += await journal.commit_large(lambda transaction: payloads.remove_pieces(transaction, PIECES_AT_ONCE))
        await pause(PAUSE_S)
    return count


@dataclass(frozen=True, slots=True)
class _Cutoffs:
    """Timestamps up to which records of each class are past their term. ISO 8601 in UTC sorts as text."""

    reads: str
    others: str

    @classmethod
    def at(cls, terms: Terms, now_ms: int) -> _Cutoffs:
        return cls(_years_before(now_ms, terms.reads_years), _years_before(now_ms, terms.others_years))

    def before(self, at_ms: int | None) -> _Cutoffs:
        """The same cutoffs, but nothing made at this time or later."""
        if at_ms is None:
            return self
        bound = iso(at_ms - 1)
        return _Cutoffs(min(self.reads, bound), min(self.others, bound))

    def passed(self, body: bytes) -> bool:
        """Whether a record is past its term. One without a time is kept."""
        record = orjson.loads(body)
        made = record.get("timestamp")
        if not isinstance(made, str) or len(made) != len(self.others) or not made.endswith("Z"):
            return False
        return made <= (self.reads if record.get("mutationClass") == "read_only" else self.others)


def _years_before(now_ms: int, years: int) -> str:
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    # 29 February has no counterpart in most years; the earlier day keeps more.
    day = 28 if (now.month, now.day) == (2, 29) else now.day
    then = now.replace(year=now.year - years, day=day)
    return iso(now_ms - round((now - then).total_seconds() * 1000))


def _due(reader: Reader, cutoffs: _Cutoffs, purged_through: int, limit: int) -> Iterator[Segment]:
    """Yield the segments that may be removed: as far as every record is past its term, and no further
    than the limit.
    """
    first, last, head = purged_through + 1, purged_through, b""
    for seq, body, hash_ in administration.records_between(reader, purged_through, limit):
        # INVARIANT: nothing inside its term is removed, and nothing is removed before what lies in front of it.
        if not cutoffs.passed(body):
            break
        last, head = seq, hash_
        if last - first + 1 == SEGMENT_RECORDS:
            yield Segment(first, last, head)
            first = last + 1
    if last >= first:
        yield Segment(first, last, head)


def _give_back(connection: Administration) -> bool:
    with administration.in_turn(connection):
        return give_back(connection)


def _remove(
    connection: Administration, home: Home, signer: Signer, segment: Segment, *, now_ms: int, by: str, archive: str
) -> None:
    """Replace records by their signed segment, and record and anchor that this was done, and where they are now."""
    with administration.writing(connection, now_ms) as transaction:
        _refuse_if_changed(transaction, segment)
        signature = signer.sign("segment", segment.last_seq, segment.hash, now_ms)
        last = SignedHead(segment.last_seq, segment.hash, now_ms, signer.key_id, signature)
        administration.replace_by_segment(transaction, segment.first_seq, last)
        call = f"purge:{segment.last_seq}"
        facts: dict[str, Any] = {
            "firstSeq": segment.first_seq,
            "lastSeq": segment.last_seq,
            "hash": segment.hash.hex(),
            "by": by,
        }
        if archive:
            facts["archive"] = archive
        transaction.append("purge", call, records.plain("purge", call, now_ms, **facts))
        anchor = anchor_head(transaction, signer)
    note_anchor(home, anchor)


def _refuse_if_changed(reader: Reader, segment: Segment) -> None:
    newest, hash_ = administration.purged_through(reader), verify_reads.hash_of(reader, segment.last_seq)
    if newest != segment.first_seq - 1 or hash_ != segment.hash:
        raise Failure("E3410", "another purge ran meanwhile; what it removed is on record", retry_after_ms=100)
