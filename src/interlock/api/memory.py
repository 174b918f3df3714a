"""The memory of conversations: records of results, kept in the store for each caller and session.

    working, session   belong to one session of the caller
    episodic           belongs to the caller, whatever the session

A record states where it comes from, its layer and when it ends. Records are encrypted, count against the caller's
quotas and expire like kept results, because they hold the same data.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.data.canonical import canonical, encode
from interlock.store import payloads
from interlock.store.payloads import Payload
from interlock.window.routing import MemoryRecord

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.store.port import Reader, Transaction
    from interlock.window.routing import Layer

LARGEST: Final = 65_536
MOST_RECALLED: Final = 1000


class Memory:
    """The records of one session of a caller, and those of the caller."""

    def __init__(self, parts: Parts, caller: Caller, session: str) -> None:
        self._parts = parts
        self._caller = caller
        self._session = session

    async def write(self, record: MemoryRecord) -> bool:
        """Remember something; False if the same is remembered in this layer and has not expired.

        E3004 for a record that is too large, E3407 where the caller's quota has no room.
        """
        body = encode(record.document())
        if len(body) > LARGEST:
            words = "remember a part of it, or its handle"
            raise Failure("E3004", f"a memory record has at most {LARGEST:,} bytes", resolution=words)
        ref = f"{self._prefix(record.layer)}{record.digest}"
        owner, store = f"{self._caller.tenant}/{self._caller.id}", self._parts.storage.payloads

        def unit(transaction: Transaction) -> bool:
            if payloads.lasts(transaction, ref, transaction.now_ms):
                return False
            store.check_room(transaction, self._caller, len(body))
            payloads.remove(transaction, ref)
            sealed = self._parts.box.seal(body, purpose="payload", about=ref)
            made = Payload(
                ref, record.invocation_id, owner, sealed, len(body), transaction.now_ms, record.expires_ms, ""
            )
            payloads.insert(transaction, made)
            return True

        return await self._parts.journal.commit(unit)

    async def recall(self, layer: Layer | None = None) -> list[MemoryRecord]:
        """Return the records that have not expired, oldest first; of more than 1,000, the newest."""
        layers: tuple[Layer, ...] = ("working", "session", "episodic") if layer is None else (layer,)
        now_ms = self._parts.clock.now_ms()

        def read(reader: Reader) -> list[tuple[str, bytes, int]]:
            prefixes = [self._prefix(one) for one in layers]
            return [row for one in prefixes for row in payloads.lasting(reader, one, now_ms, MOST_RECALLED)]

        found = sorted(await self._parts.readers.read(read), key=lambda row: row[2])[-MOST_RECALLED:]
        # Up to 64 MB are decrypted and parsed.
        return await WALKS.run(lambda: [self._opened(ref, body) for ref, body, _ in found])

    def _opened(self, ref: str, body: bytes) -> MemoryRecord:
        document: Any = orjson.loads(self._parts.box.open(body, purpose="payload", about=ref))
        return MemoryRecord(**cast("Json", document))

    def _prefix(self, layer: Layer) -> str:
        session = "" if layer == "episodic" else self._session
        scope = hashlib.sha256(canonical([self._caller.tenant, self._caller.id, layer, session])).hexdigest()
        return f"memory:{scope[:32]}:"
