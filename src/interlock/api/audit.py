"""The journal, as an auditor reads it at an endpoint. INVARIANT: the reading is on record before anything is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING

import orjson

from interlock.api.rights import require, same_place
from interlock.call.context import Caller
from interlock.core.clock import new_id
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.store import ledger, records
from interlock.store.last_head import note_anchor
from interlock.store.port import Reader, Transaction, Unit
from interlock.store.signing import Signer

if TYPE_CHECKING:
    from interlock.api.parts import Parts

PAGE = 100
# How many records one page looks through at most, and how many one slice of a long read takes.
LOOKED_THROUGH = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """Which records of the journal somebody wants to see. Times are ISO 8601 in UTC, `since` included, `until` not."""

    call: str | None = None
    tool: str | None = None
    caller: str | None = None
    kind: str | None = None
    since: str | None = None
    until: str | None = None

    def fits(self, record: Json) -> bool:
        """Whether a record is among them, as far as its body tells."""
        at = str(record.get("timestamp", ""))
        return (
            (self.tool is None or self.tool in _tools_named(record))
            and (
                self.caller is None or self.caller in (record.get("callerId"), record.get("agentId"), record.get("by"))
            )
            and (self.since is None or at >= self.since)
            and (self.until is None or at < self.until)
        )

    def document(self) -> Json:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


class Audit:
    """Proof of what happened, for those who look."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._one_verifies = asyncio.Lock()

    async def records(
        self, sought: Sought, *, by: Caller, door: str, after: int = 0, limit: int = PAGE
    ) -> tuple[list[Json], int | None]:
        """Records of the journal in their order, and the place to go on from. That they were read is itself recorded.

        A page may hold fewer than `limit`, even none, and still have more after it: so many were looked through.
        """
        filters = sought.document()
        await self.note("records", {"sought": filters} if filters else {}, by=by, door=door)
        return await self._parts.readers.read(partial(_page, sought, by, after, limit))

    async def verify(self, *, by: Caller, door: str) -> Json:
        """Recompute the whole chain and check it against its signed heads."""
        from interlock.audit.chain import verify

        await self.note("verify", {}, by=by, door=door, everything=True)
        async with self._one_verifies:
            return (await self._parts.readers.run(partial(verify, self._parts.home))).document()

    async def export(self, *, by: Caller, door: str) -> AsyncGenerator[bytes]:
        """Every record as JSON lines, byte for byte as it is chained: {"seq", "hash", "record"}."""
        upto = await self.begin_export(by=by, door=door)
        return self._stream(upto)

    async def _stream(self, upto: int) -> AsyncGenerator[bytes]:
        async for _, lines in self.lines(upto):
            yield lines

    def lines(self, upto: int) -> AsyncGenerator[tuple[int, bytes]]:
        """The journal up to a record, some lines at a time, and how many. Other calls go on meanwhile."""
        from interlock.audit.exported import export_lines

        return self._parts.readers.slices(partial(export_lines, self._parts.home, upto))

    async def begin_export(self, *, by: Caller, door: str) -> int:
        """Put on record that the whole journal is handed out, and sign that record: an export ends with a signed head.

        Returns its place.
        """
        from interlock.store.administration import anchor_head

        note, signer = self._noting("export", {}, by=by, door=door, everything=True), Signer(self._parts.home.keys)

        def unit(transaction: Transaction) -> tuple[int, bytes]:
            return note(transaction), anchor_head(transaction, signer)

        place, anchor = await self._parts.journal.commit(unit)
        note_anchor(self._parts.home, anchor)
        return place

    async def note(self, what: str, facts: Json, *, by: Caller, door: str, everything: bool = False) -> int:
        """Put on record that the journal is read, before anything of it is shown. Returns the record's place."""
        return await self._parts.journal.commit(self._noting(what, facts, by=by, door=door, everything=everything))

    def _noting(self, what: str, facts: Json, *, by: Caller, door: str, everything: bool) -> Unit[int]:
        """The unit that puts a reading on record; E3206 if the caller may not read so much."""
        require(by, "audit:read", "reading the audit journal")
        if everything and by.tenant != "local":
            raise Failure("E3206", "the whole journal is for callers of the tenant `local`; ask for records")
        clock = self._parts.clock
        ref = new_id(clock.now_ms(), clock.random_bytes(10))

        def unit(transaction: Transaction) -> int:
            body = records.plain("audit.read", ref, transaction.now_ms, by=by.acting, what=what, door=door, **facts)
            transaction.append("audit.read", ref, body)
            return transaction.head[0]

        return unit


def _page(sought: Sought, by: Caller, after: int, limit: int, reader: Reader) -> tuple[list[Json], int | None]:
    """One page of the records that somebody wants to see."""
    rows = ledger.behind(reader, after, kind=sought.kind, call=sought.call, most=LOOKED_THROUGH)
    found: list[Json] = []
    for looked, (seq, digest, body) in enumerate(rows, 1):
        record: Json = orjson.loads(body)
        if same_place(by, record.get("tenant")) and sought.fits(record):
            found.append({"seq": seq, "hash": digest.hex(), "record": record})
        if len(found) == limit or looked == LOOKED_THROUGH:
            return found, seq
    return found, None


def _tools_named(record: Json) -> set[str]:
    """A record's tool by address and with its version, whichever way its kind writes it."""
    named = {str(record[name]) for name in ("toolId", "tool") if record.get(name)}
    return named | {name.partition("@")[0] for name in named} | {f"{record.get('toolId')}@{record.get('version')}"}
