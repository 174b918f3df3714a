"""Reading a data directory without opening it.

Opening one builds every part of the gateway, which takes most of a second of processor time. A command that only lists
calls needs the database alone.

INVARIANT: what is read is what an opened data directory shows. If opening would change something first, such as calls
of dead processes that it closes, or tickets that it ends because their time is up, there is nothing to read with. Nor
is there if the journal was cut back, goes on unsigned, or has a signature that its key did not make, for which opening
refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar, cast

from interlock.core.errors import Failure
from interlock.store import facts, idempotency, last_head
from interlock.store.calls import BEGUN
from interlock.store.home import Home, refuse_behind
from interlock.store.inspection import opened
from interlock.store.port import Reader, StoreError
from interlock.store.schema_version import is_known
from interlock.store.signing import Signer
from interlock.store.tickets import any_due

T = TypeVar("T")


def reader_at_rest(home: Home, within: ExitStack) -> Reader | None:
    """The database in one read transaction that `within` ends; None if the data directory has to be opened first."""
    try:
        anchored, last = home.last_anchor(), last_head.read(home)
        if home.new or last is None:
            return None
        reader = within.enter_context(opened(home))
        if not is_known(reader):
            return None
        refuse_behind(reader, anchored)
        ends = last_head.ends(reader, last)
        signer = Signer(home.keys)
        if not signer.published:
            return None
        signer.check(None if ends.signed is None else ends.signed.key_id)
        last_head.refuse_forged(signer.public, ends)
        last_head.refuse_rewritten(reader, ends)
        in_order = all(map(home.runs, _owners(reader))) and not any_due(reader, home.now_ms(reader))
        return reader if in_order else None
    except (Failure, StoreError, OSError):
        return None  # opening it says what is wrong


class StoreAtRest:
    """A store that only reads, in one read transaction, for parts that are built on a store."""

    fresh_until = math.inf
    near = True

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def changes(self) -> StoreAtRest:
        """This object itself: nothing changes here, so no cache is ever invalidated."""
        return self

    async def read(self, work: Callable[[Reader], T]) -> T:
        return work(self._reader)

    def watch(
        self, families: tuple[str, ...], load: Callable[[Reader], T], apply: Callable[[T], None], **_: object
    ) -> Callable[[], None]:
        """Fill a cache, once."""
        apply(load(self._reader))
        return lambda: None


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a store that only reads. It never waits, so no event loop is loaded for it."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    work.close()
    raise RuntimeError("a read of a store at rest waited for something")


def _owners(reader: Reader) -> set[str]:
    """The processes of calls that run, as far as is recorded."""
    reads = (owner for _, owner in facts.between(reader, BEGUN, BEGUN + "\U0010ffff"))
    return {*idempotency.executing_owners(reader), *reads}
