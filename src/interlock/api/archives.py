"""Backups, removed records and old checkpoints in an S3-compatible store: listed, fetched, removed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.api.archive_credential import archive_credential
from interlock.api.rights import require_here
from interlock.audit.archive import TERMS, Archived, Kind, archive_at, chosen_kind
from interlock.audit.archiving import CHECKPOINTS, RECORDS, put_checkpoints_back, verify_records
from interlock.audit.backups import store_time
from interlock.core.errors import Failure
from interlock.core.threads import DISK
from interlock.store.homes import home_at

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json

Progress = Callable[[int, int], None]


async def list_archived(path: Path, address: str) -> list[Json]:
    """List the content of an address, the oldest first, with the end of its term.

    `path` is the data directory whose settings name the credential for it.
    """
    async with archive_at(address, await archive_credential(path)) as found:
        return [_document(one) for one in await found.list()]


def check_restorable(address: str, to: Path | None) -> str | None:
    """Say why records or checkpoints cannot be got back from an address to a directory; None if they can."""
    kind = chosen_kind(address)
    if kind not in ("records", "checkpoints"):
        return "name archived records or checkpoints as interlock archive list does, after the address"
    if (kind == "records") != (to is not None):
        return "records need --to DIRECTORY" if kind == "records" else "--to is for records"
    return None


async def expire(path: Path, address: str) -> list[Json]:
    """Remove what is past the term of its tier. The newest finished backup is never removed.

    The time is that of the store of the data directory at `path`; if there is none, that of the machine.
    """
    now = store_time(home_at(path))
    async with archive_at(address, await archive_credential(path)) as found:
        return [_document(one) for one in await found.expire(now)]


async def get_records(parts: Parts, address: str, to: Path, *, by: Caller, progress: Progress) -> Json:
    """Write archived records to a new directory, as an export of the journal, and verify them."""
    require_here(by, "policy:admin", "reading an archive")
    _refuse_taken(to)
    async with _fetched(parts, address, "records", progress) as (place, name):
        return {"archived": name, **await DISK.run(_write_records, place / RECORDS, to)}


async def get_checkpoints(parts: Parts, address: str, *, by: Caller, progress: Progress) -> Json:
    """Put archived checkpoints back in the store, where their calls show them again."""
    require_here(by, "policy:admin", "reading an archive")
    async with _fetched(parts, address, "checkpoints", progress) as (place, name):
        count = await put_checkpoints_back(parts.journal, place / CHECKPOINTS, by=by.id, name=name)
    return {"archived": name, "checkpoints": count}


@asynccontextmanager
async def _fetched(parts: Parts, address: str, kind: Kind, progress: Progress) -> AsyncGenerator[tuple[Path, str]]:
    """A temporary directory with what an address names, and the name of that. E3004 if it is of another kind."""
    if chosen_kind(address) != kind:
        raise Failure("E3004", f"the address names no archived {kind}")
    credential = await parts.background.archive_credential()
    with tempfile.TemporaryDirectory(prefix="interlock-archive-") as place:
        async with archive_at(address, credential) as found:
            # The address names what to read, so the time does not matter.
            name = await found.fetch(Path(place), datetime.now(UTC), progress)
        yield Path(place), name


def _refuse_taken(to: Path) -> None:
    if to.exists():
        words = f"`{to}` is there already; nothing was written"
        raise Failure("E3411", words, resolution="choose a directory that does not exist")


def _write_records(fetched: Path, to: Path) -> Json:
    """Verify fetched records and put them in their place, whether they verify or not."""
    verdict = verify_records(fetched)
    to.mkdir(parents=True, mode=0o700)
    path = shutil.copy(fetched, to / RECORDS)
    return {"out": str(path), "verdict": verdict.document()}


def _document(one: Archived) -> Json:
    until = one.made + TERMS[one.tier]
    return {
        "name": one.name, "kind": one.kind, "tier": one.tier, "made": _iso(one.made), "until": _iso(until),
        "whole": one.whole,
    }  # fmt: skip


def _iso(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")
