"""Reading a data directory without opening it.

Opening one builds every part of the gateway, which takes most of a second of processor time. A command that only lists
calls needs the database alone.

INVARIANT: what is read is what an opened data directory shows. If opening would change something first, such as calls
of dead processes that it closes, or tickets that it ends because their time is up, there is nothing to read with. Nor
is there if the journal was cut back or goes on unsigned, for which opening refuses it.
"""

from __future__ import annotations

from contextlib import ExitStack

from interlock.core.errors import Failure
from interlock.store import facts, idempotency, last_head
from interlock.store.calls import BEGUN
from interlock.store.connection import StoreError
from interlock.store.home import SCHEMA_HEAD, Home, refuse_behind
from interlock.store.inspection import opened, schema
from interlock.store.port import Reader
from interlock.store.tickets import any_due


def reader_at_rest(home: Home, now_ms: int, within: ExitStack) -> Reader | None:
    """The database in one read transaction that `within` ends; None if the data directory has to be opened first."""
    try:
        anchored, last = home.last_anchor(), last_head.read(home)
        if home.new or last is None:
            return None
        reader = within.enter_context(opened(home))
        if schema(reader) != SCHEMA_HEAD:
            return None
        refuse_behind(reader, anchored)
        last_head.refuse_rewritten(reader, last_head.ends(reader, last))
        in_order = all(map(home.runs, _owners(reader))) and not any_due(reader, now_ms)
        return reader if in_order else None
    except (Failure, StoreError, OSError):
        return None  # opening it says what is wrong


def _owners(reader: Reader) -> set[str]:
    """The processes of calls that run, as far as is recorded."""
    reads = (owner for _, owner in facts.between(reader, BEGUN, BEGUN + "\U0010ffff"))
    return {*idempotency.executing_owners(reader), *reads}
