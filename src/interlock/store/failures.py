"""Failures of the store, in words that name neither a path nor a statement."""

from __future__ import annotations

import errno
from typing import Literal

from interlock.core.errors import Failure
from interlock.store.port import StoreError

RESTORE = (
    "restore the whole data directory from one backup, its keys and its anchors.jsonl with it; to begin anew, knowing"
    " that calls made before can then run again, move this data directory away or choose another"
)
_BUSY = ("database is locked", "too many", "server is out of memory")
_FOREIGN = ("not a database", "malformed", "encrypted")
# What a server lacks for a moment. Nothing was done for a caller who hears of it.
_EXHAUSTED = ("too many connections", "server is out of memory")


def no_room(error: StoreError | OSError) -> Failure | None:
    """The failure to tell when an error means that the disk is full; None when it means something else."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT) if isinstance(error, OSError) else "disk is full" in str(error)
    if not full:
        return None
    return Failure(
        "E3803",
        "the disk that holds the data directory is full",
        resolution="make room on the disk, then send the call again",
    )


def store_failure(error: StoreError, attempt: Literal["read", "written", "used"] = "used") -> Failure:
    """Convert a database error to a failure, without the path or the statement. `attempt` is what was tried."""
    if (full := no_room(error)) is not None:
        return full
    text = str(error)
    if attempt != "written" and any(words in text for words in _EXHAUSTED):
        return Failure("E3001", f"the store cannot be {attempt} now: {text}", retry_after_ms=1000)
    if any(words in text for words in _FOREIGN):
        return Failure("E3804", "the database in this data directory is damaged or not a database")
    if any(words in text for words in _BUSY):
        return Failure("E3803", f"the journal cannot be {attempt} now: {text}")
    return Failure("E3801", f"the journal cannot be {attempt}: {text}")
