"""The journal of a data directory that is not opened, or of an export: verified; and its unsigned end, accepted.

For a person at the files. No right is needed to verify them, since anybody who can read them can do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from interlock.store.homes import home_at

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.data.schema import Json

KnownHead = tuple[int, bytes]


def verify(
    path: Path,
    *,
    public_key: bytes | None = None,
    known_head: KnownHead | None = None,
    database_only: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Json:
    """Recompute the whole chain of a data directory and check it against its signed heads."""
    from interlock.audit.chain import verify as check

    home = home_at(path)
    verdict = check(home, public_key=public_key, known_head=known_head, database_only=database_only, progress=progress)
    return verdict.document()


def verify_export(
    lines: Iterable[bytes],
    *,
    public_key: bytes | None = None,
    known_head: KnownHead | None = None,
    progress: Callable[[int], None] | None = None,
) -> Json:
    """The same of the lines of an export; without a key, by the one that it names."""
    from interlock.audit.exported import verify_export as check

    return check(lines, public_key=public_key, known_head=known_head, progress=progress).document()


def unsigned_tail(path: Path, *, accept_because: str | None = None) -> Json:
    """The unsigned records at the end of a journal. With a reason, the local user accepts them (`record` says where).

    `fault` is why a start refuses them; without one there is nothing to accept.
    """
    from interlock.api.local_user import local_user
    from interlock.audit.tail import accept
    from interlock.audit.tail import unsigned_tail as look

    home = home_at(path)
    tail = look(home)
    record = None
    if accept_because is not None and tail.fault is not None:
        record = accept(home, tail, reason=accept_because, by=f"local:{local_user()}")
    return {**tail.document(), "accepted": record is not None, "record": record}
