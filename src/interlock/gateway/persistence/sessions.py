"""Sessions: the state that the tools of one caller share from call to call."""

from __future__ import annotations

from functools import lru_cache

import orjson

from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.canonical import sealed_digest
from interlock.effects.session import SessionState
from interlock.store import sessions
from interlock.store.port import Reader, Store, Transaction
from interlock.store.sealing import Box


class SessionStore:
    """Reads and writes the sessions of one data directory."""

    def __init__(self, journal: Store, box: Box) -> None:
        self._journal = journal
        self._box = box
        self.near = journal.near

    async def read_far(self, caller: Caller, name: str) -> tuple[int, str]:
        """The same as `read`, from a store that the event loop must not wait for."""
        return await self._journal.read(lambda reader: self.read(caller, name, reader))

    def read(self, caller: Caller, name: str, reader: Reader | None = None) -> tuple[int, str]:
        """Return the version of a caller's session and its values as JSON."""
        row_id = _session_id(caller.tenant, caller.id, name)
        row = sessions.find(self._journal.reader if reader is None else reader, row_id)
        if row is None:
            return 0, "{}"
        version, state = row
        if isinstance(state, bytes):
            state = self._box.open(state, purpose="session", about=row_id.hex()).decode()
        return version, state

    def store(self, transaction: Transaction, caller: Caller, name: str, session: SessionState) -> None:
        """Write a session's state, unless another call has changed it meanwhile (E3410)."""
        row_id = session_id(caller, name)
        if sessions.version(transaction, row_id) != session.version:
            raise Failure("E3410", "the session was changed by another call meanwhile", retry_after_ms=10)
        state = self._box.seal(orjson.dumps(session.values_now()), purpose="session", about=row_id.hex())
        sessions.put(transaction, row_id, session.version + 1, state)


def session_id(caller: Caller, session: str) -> bytes:
    """Return the id of the row of a session, which only the tenant and caller that own it can compute."""
    return _session_id(caller.tenant, caller.id, session)


_session_id = lru_cache(maxsize=256)(sealed_digest)
