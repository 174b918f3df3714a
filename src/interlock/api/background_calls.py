"""Calls that run in the background: which run, how many may, and the results that are kept for their callers."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from interlock.api.background_results import BackgroundResults
from interlock.call.results import Persistence, Result
from interlock.core.errors import Failure
from interlock.store import ledger

if TYPE_CHECKING:
    from interlock.api.background_results import Stored
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.call.phases import Request
    from interlock.data.schema import Json

# How many background calls run, and how many of their results are kept in memory for clients. The rest are read from
# the store. No caller takes all of the room.
MOST_CALLS = 1000
MOST_CALLS_EACH = 250
_EVERY_S = 0.05

_log = logging.getLogger("interlock.api")

Owner = tuple[str, str]


class Asked(Protocol):
    """The tool that a call was asked of."""

    @property
    def tool(self) -> str: ...

    @property
    def version(self) -> str | None: ...


# many methods: the calls of this server and those of others are answered in the same way
class BackgroundCalls:
    """The background calls of one server."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running: dict[str, tuple[Caller, Asked, asyncio.Task[Result]]] = {}
        self._results: OrderedDict[str, tuple[Caller, Result]] = OrderedDict()
        self._stored = BackgroundResults(parts)
        self._storing: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """The number of calls that run now."""
        return len(self._running)

    async def announce(self, request: Request, call_id: str, caller: Caller) -> None:
        """Note in the store that this server runs a call, before its id is given away. E3701 if there is no room."""
        self.check_room(caller)
        try:
            await self._stored.begin(request, call_id, caller)
            self.check_room(caller)
        except BaseException:
            self._stored.forget(call_id)  # also where its caller has gone meanwhile
            raise

    def add(self, call_id: str, ask: Asked, caller: Caller, task: asyncio.Task[Result]) -> None:
        """Keep a call until it ends, then its result. `check_room` comes first."""
        self._running[call_id] = caller, ask, task
        task.add_done_callback(lambda done: self._store_result(call_id, ask, caller, done))

    async def adopt(self, request: Request, call_id: str, caller: Caller, task: asyncio.Task[Result]) -> None:
        """Go on in the background with a call that somebody waited for until now. Raises E3701 if there is no room.

        Every server knows it when this returns.
        """
        self.check_room(caller)
        # Before anything is awaited: the end of the call is stored after its beginning.
        self.add(call_id, request, caller, task)
        await self._stored.begin(request, call_id, caller)

    def task(self, call_id: str) -> asyncio.Task[Result] | None:
        """Return the task of a call that runs here."""
        running = self._running.get(call_id)
        return None if running is None else running[2]

    def check_room(self, caller: Caller) -> None:
        """Refuse (E3701) a further background call of a caller or a tenant that has enough of them."""
        settings, owner = self._parts.settings, _owner(caller)
        running = [_owner(one) for one, _, _ in self._running.values()]
        for count, most, whose, name in (
            (running.count(owner), settings.max_background_per_caller, "of this caller", "max_background_per_caller"),
            (
                sum(tenant == caller.tenant for tenant, _ in running), settings.max_background_per_tenant,
                "of this tenant", "max_background_per_tenant",
            ),
            (len(running), settings.max_background, "of this server", "max_background"),
        ):  # fmt: skip
            if count >= most:
                words = f"{count} calls {whose} run in the background already, and `{name}` allows no more"
                raise Failure("E3701", words, retry_after_ms=1000)

    def _store_result(self, call_id: str, ask: Asked, caller: Caller, done: asyncio.Task[Result]) -> None:
        del self._running[call_id]
        failed = done.cancelled() or done.exception() is not None
        result = None if failed else done.result()
        storing = asyncio.ensure_future(self._stored.keep(call_id, caller, ask.tool, ask.version, result))
        self._storing.add(storing)
        storing.add_done_callback(self._has_stored)
        if failed:
            return
        owner = _owner(caller)
        self._results[call_id] = caller, done.result()
        theirs = [one for one, (by, _) in self._results.items() if _owner(by) == owner]
        if len(theirs) > MOST_CALLS_EACH:
            del self._results[theirs[0]]
        if len(self._results) > MOST_CALLS:
            self._results.popitem(last=False)

    def _has_stored(self, storing: asyncio.Task[None]) -> None:
        self._storing.discard(storing)
        if not storing.cancelled() and (error := storing.exception()) is not None:
            _log.warning("a background call could not be stored: %s", error)

    async def result(self, call_id: str, caller: Caller) -> Result | None:
        """The result of a background call of this caller, while it is kept, here or in the store."""
        by, result = self._results.get(call_id, (None, None))
        if by is not None and _owner(by) != _owner(caller):
            return None
        stored = await self._stored.find(call_id, caller)
        if result is None and stored is not None:
            result = stored.result
        if result is None:
            return None
        if stored is not None and stored.discarded:
            result = _discarded(call_id, result)  # at another server
        tool, _, version = result.tool.partition("@")
        refused = None if result.error is None else result.error.code
        facts = {"toolId": tool, "version": version or None, "error_code": refused}
        if not await self._reaches(call_id, by, caller, facts):
            return None
        if result.pending and await self._has_ended(call_id):
            return None  # what was kept is how it stood before a person decided
        return result

    async def runs_for(self, call_id: str, caller: Caller) -> bool:
        """Whether a call of this caller runs in the background, here or at another server on the store."""
        by, ask, _ = self._running.get(call_id, (None, None, None))
        if by is None or ask is None:
            stored = await self.stored(call_id, caller)
            return stored is not None and stored.running and call_id not in self._results
        if _owner(by) != _owner(caller):
            return False
        return await self._reaches(call_id, by, caller, await self._facts(ask, by))

    async def stored(self, call_id: str, caller: Caller) -> Stored | None:
        """A background call of this caller in the store; None if there is none within their token."""
        stored = await self._stored.find(call_id, caller)
        if stored is None or not await self._reaches(call_id, None, caller, await self._facts(stored, caller)):
            return None
        return stored

    async def is_abandoned(self, call_id: str, caller: Caller) -> bool:
        """Whether the server that ran a background call of this caller has died before it wrote the end."""
        stored = await self._stored.find(call_id, caller)
        return stored is not None and stored.abandoned

    async def ended(self, call_id: str, caller: Caller) -> None:
        """Wait until no server runs a call any more."""
        while await self.runs_for(call_id, caller):  # noqa: ASYNC110 - only the store tells that another server ended it
            await asyncio.sleep(_EVERY_S)

    async def _facts(self, ask: Asked, by: Caller) -> Json:
        """The tool of a call that runs. Without a version it is about to be refused, as a call of anybody would be."""
        with suppress(Failure):
            row = (await self._parts.catalog.resolve(ask.tool, ask.version, by.capability)).row
            return {"toolId": row.address, "version": row.version}
        return {}

    async def _reaches(self, call_id: str, by: Caller | None, caller: Caller, facts: Json) -> bool:
        """Whether a call that `by` made in the background lies within the token of another caller of the same owner.

        Another server does not know who `by` is; then the token has to cover the call.
        """
        if by is not None and (by is caller or by.capability == caller.capability):
            return True
        if caller.capability is not None and caller.capability.bound:
            return await self._parts.ownership.has_call(caller, call_id)  # the journal alone knows the call's resources
        return await self._parts.ownership.reaches(caller, facts)

    async def _has_ended(self, call_id: str) -> bool:
        return await self._parts.journal.read(lambda reader: ledger.is_closed(reader, call_id))

    async def discard(self, call_id: str, caller: Caller) -> None:
        """Let go of the value of a kept result; the rest of it stays at the server that ran the call."""
        kept = self._results.get(call_id)
        if kept is not None:
            self._results[call_id] = kept[0], _discarded(call_id, kept[1])
        await self._stored.discard(call_id, caller)

    async def close(self, within_s: float) -> None:
        """Let the calls end; after the given time they are cut off, which is on record."""
        tasks = [task for _, _, task in self._running.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await asyncio.gather(*self._storing, return_exceptions=True)


def _discarded(call_id: str, result: Result) -> Result:
    if not result.ok:
        return result
    gone = Persistence(decision="link", ref=f"payload:{call_id}", reason="discarded by its caller")
    return replace(result, value=None, persistence=gone)


def _owner(caller: Caller) -> Owner:
    return caller.tenant, caller.id
