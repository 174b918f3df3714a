"""Puts what the store lets go of into an archive, and gets it back: records past their term, and old checkpoints.

Both are written to the tier `cold` and read back before the store removes anything. INVARIANT: nothing that could not
be read back from the archive is removed from the store.

Records are written as an export, which verifies without the journal they come from. Checkpoints stay encrypted; the
sealing keys that they need are noted in the store, so that a change of the key does not drop them.
"""

from __future__ import annotations

import asyncio
import base64
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from interlock.audit.archive import archive_at
from interlock.audit.exported import export_lines, verify_export
from interlock.core.errors import Failure
from interlock.store import checkpoints, facts, records
from interlock.store.checkpoints import CheckpointRow
from interlock.store.inspection import opened
from interlock.store.last_head import SignedHead
from interlock.store.sealing import ARCHIVED_UNDER, is_sealed, key_id_of
from interlock.store.signing import Signer

if TYPE_CHECKING:
    from interlock.audit.chain_verdict import ChainVerdict
    from interlock.store.home import Home
    from interlock.store.port import Reader, Store, Transaction

RECORDS, CHECKPOINTS = "records.jsonl", "checkpoints.jsonl"
MOST_CHECKPOINTS = 10_000
_AT_ONCE = 100


def archive_records(home: Home, address: str, last: tuple[int, bytes], *, now_ms: int, credential: str = "") -> str:
    """Write the journal up to a record to an archive, as an export; its name there. Blocks: run it in a thread."""
    signer, (seq, hash_) = Signer(home.keys), last
    head = SignedHead(seq, hash_, now_ms, signer.key_id, signer.sign("head", seq, hash_, now_ms))

    async def store(source: Path) -> str:
        async with archive_at(address, credential) as archive:
            return (await archive.store(source, "cold", _time(now_ms), kind="records")).name

    with tempfile.TemporaryDirectory(prefix="interlock-archive-") as place:
        path = Path(place) / RECORDS
        with path.open("wb") as file, opened(home) as reader:
            for _, lines in export_lines(home, seq, reader, last=head):
                file.write(lines)
        verdict = verify_records(path)
        if not verdict.intact or verdict.head != (seq, hash_.hex()):
            raise Failure("E3804", "the records to archive do not verify", resolution="see interlock audit verify")
        return asyncio.run(store(Path(place)))


def verify_records(path: Path, public_key: bytes | None = None) -> ChainVerdict:
    """Verify archived records by the key they name, or a given one."""
    with path.open("rb") as file:
        return verify_export(file, public_key=public_key)


async def archive_checkpoints(
    journal: Store, address: str, *, until_ms: int, now_ms: int, by: str, credential: str = ""
) -> int:
    """Write checkpoints at milestones up to a time to an archive and remove them from the store; their number."""
    places = await journal.read(lambda reader: checkpoints.to_archive(reader, until_ms, MOST_CHECKPOINTS))
    if not places:
        return 0
    with tempfile.TemporaryDirectory(prefix="interlock-archive-") as directory:
        keys: set[str] = set()
        with (Path(directory) / CHECKPOINTS).open("wb") as file:
            for place in places:
                row = await journal.read(lambda reader, place=place: _row(reader, place))
                if row is None:
                    raise Failure("E3410", "another process archives checkpoints", retry_after_ms=1000)
                file.write(orjson.dumps([*row[:-1], base64.b64encode(row.body).decode()]) + b"\n")
                if is_sealed(row.body):
                    keys.add(key_id_of(row.body))
        # Before anything is in the archive: a change of the sealing key meanwhile keeps these.
        await journal.commit(lambda transaction: _note_keys(transaction, keys))
        async with archive_at(address, credential) as archive:
            stored = await archive.store(Path(directory), "cold", _time(now_ms), kind="checkpoints")
    for start in range(0, len(places), _AT_ONCE):
        some = places[start : start + _AT_ONCE]

        def unit(transaction: Transaction, some: list[tuple[str, int]] = some) -> None:
            checkpoints.remove(transaction, some)
            call = f"archive:{stored.name}"
            facts = {"archived": len(some), "archive": stored.name, "by": by}
            transaction.append("checkpoint", call, records.plain("checkpoint", call, transaction.now_ms, **facts))

        await journal.commit(unit)
    return len(places)


async def put_checkpoints_back(journal: Store, path: Path, *, by: str, name: str) -> int:
    """Put archived checkpoints back into the store; the number of those that were not there."""
    count = 0
    with path.open("rb") as file:
        while some := file.readlines(1 << 20):
            try:
                rows = [_parsed(line) for line in some]
            except (ValueError, TypeError):
                raise Failure("E3804", f"`{name}` holds something that is no checkpoint") from None

            def unit(transaction: Transaction, rows: list[CheckpointRow] = rows) -> int:
                added = sum(checkpoints.put_back(transaction, row) for row in rows)
                call = f"archive:{name}"
                facts = {"restored": added, "archive": name, "by": by}
                transaction.append("checkpoint", call, records.plain("checkpoint", call, transaction.now_ms, **facts))
                return added

            count += await journal.commit(unit)
    return count


def _parsed(line: bytes) -> CheckpointRow:
    *columns, body = orjson.loads(line)
    row = CheckpointRow._make([*columns, base64.b64decode(body, validate=True)])
    for value, wanted in zip(row, (str, int, str, str, str, str, str, int, int, str, str), strict=False):
        if type(value) is not wanted:
            raise ValueError(value)
    return row


def _row(reader: Reader, place: tuple[str, int]) -> CheckpointRow | None:
    rows = checkpoints.of_call(reader, place[0], after=place[1] - 1, limit=1)
    return rows[0] if rows and rows[0].seq == place[1] else None


def _note_keys(transaction: Transaction, keys: set[str]) -> None:
    noted = {*(facts.get(transaction, ARCHIVED_UNDER) or "").split()}
    if keys - noted:
        facts.put(transaction, ARCHIVED_UNDER, " ".join(sorted(noted | keys)))


def _time(now_ms: int) -> datetime:
    return datetime.fromtimestamp(now_ms / 1000, UTC)
