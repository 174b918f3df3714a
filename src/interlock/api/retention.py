"""The operation of `interlock audit purge`: removes records that are past their term, and gives back their space."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from interlock.api.rights import require_here
from interlock.audit import retention

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json


async def purge(
    parts: Parts,
    *,
    by: Caller,
    through: int | None,
    before_ms: int | None,
    remove: bool,
    progress: Callable[[int, int], None],
) -> Json:
    """Remove records past their term, up to a record or to those made before a time; without `remove`, say which.

    `progress` is called with the number of removed records and the number to remove.
    """
    require_here(by, "policy:admin", "removing records")
    home, settings, now_ms = parts.home, parts.settings, parts.clock.now_ms()
    due = partial(retention.due, home, settings, now_ms=now_ms, through=through, before_ms=before_ms)
    segments = await asyncio.to_thread(due)
    freed = 0
    if remove and (segments or through):
        expected = sum(segment.records for segment in segments)
        work = partial(
            retention.purge, home, settings, now_ms=now_ms, by=by.id, through=through, before_ms=before_ms,
            progress=lambda done: progress(done, expected), credential=await parts.background.archive_credential(),
        )  # fmt: skip
        segments = await asyncio.to_thread(work)
        freed = await asyncio.to_thread(partial(retention.shrink, home, rewrite=home.alive() == 1))
    count = sum(segment.records for segment in segments)
    first, last = (segments[0].first_seq, segments[-1].last_seq) if count else (None, None)
    return {"removed": remove and count > 0, "records": count, "first": first, "last": last, "freed_bytes": freed}
