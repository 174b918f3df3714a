"""Calls that run in the background: which run, how many may, and the results that are kept for their callers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from interlock.call.results import Persistence, Result
from interlock.core.errors import Failure
from interlock.store import ledger

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json

# How many background calls run, and how many of their results are kept for clients; of the rest the journal tells,
# without their data. Nobody fills the place alone.
MOST_CALLS = 1000
MOST_CALLS_EACH = 250

Owner = tuple[str, str]


class Asked(Protocol):
    """The tool that a call was asked of."""

    @property
    def tool(self) -> str: ...

    @property
    def version(self) -> str | None: ...


class BackgroundCalls:
    """The background calls of one server."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running: dict[str, tuple[Caller, Asked, asyncio.Task[Result]]] = {}
        self._results: OrderedDict[str, tuple[Caller, Result]] = OrderedDict()

    @property
    def running(self) -> int:
        """The number of calls that run now."""
        return len(self._running)

    def add(self, call_id: str, ask: Asked, caller: Caller, task: asyncio.Task[Result]) -> None:
        """Keep a call until it ends, then its result. `check_room` comes first."""
        self._running[call_id] = caller, ask, task
        task.add_done_callback(lambda done: self._store_result(call_id, caller, done))

    def adopt(self, call_id: str, ask: Asked, caller: Caller, task: asyncio.Task[Result]) -> None:
        """Go on in the background with a call that somebody waited for until now. Raises E3701 if there is no room."""
        self.check_room(caller)
        self.add(call_id, ask, caller, task)

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

    def _store_result(self, call_id: str, caller: Caller, done: asyncio.Task[Result]) -> None:
        del self._running[call_id]
        if done.cancelled() or done.exception() is not None:
            return
        owner = _owner(caller)
        self._results[call_id] = caller, done.result()
        theirs = [one for one, (by, _) in self._results.items() if _owner(by) == owner]
        if len(theirs) > MOST_CALLS_EACH:
            del self._results[theirs[0]]
        if len(self._results) > MOST_CALLS:
            self._results.popitem(last=False)

    async def result(self, call_id: str, caller: Caller) -> Result | None:
        """The result of a background call of this caller, while it is kept."""
        by, result = self._results.get(call_id, (None, None))
        if by is None or result is None or _owner(by) != _owner(caller):
            return None
        tool, _, version = result.tool.partition("@")
        refused = None if result.error is None else result.error.code
        facts = {"toolId": tool, "version": version or None, "error_code": refused}
        if not await self._reaches(call_id, by, caller, facts):
            return None
        if result.pending and await self._has_ended(call_id):
            return None  # what was kept is how it stood before a person decided
        return result

    async def runs_for(self, call_id: str, caller: Caller) -> bool:
        """Whether a call of this caller runs in the background here."""
        by, ask, _ = self._running.get(call_id, (None, None, None))
        if by is None or ask is None or _owner(by) != _owner(caller):
            return False
        facts: Json = {}  # without a version it is about to be refused, as every caller's call of it would be
        with suppress(Failure):
            row = (await self._parts.catalog.resolve(ask.tool, ask.version, by.capability)).row
            facts = {"toolId": row.address, "version": row.version}
        return await self._reaches(call_id, by, caller, facts)

    async def _reaches(self, call_id: str, by: Caller, caller: Caller, facts: Json) -> bool:
        """Whether a call that `by` made in the background lies within the token of another caller of the same owner."""
        if by is caller or by.capability == caller.capability:
            return True
        if caller.capability is not None and caller.capability.bound:
            return await self._parts.ownership.has_call(caller, call_id)  # the journal alone knows the call's resources
        return await self._parts.ownership.reaches(caller, facts)

    async def _has_ended(self, call_id: str) -> bool:
        return await self._parts.journal.read(lambda reader: ledger.is_closed(reader, call_id))

    def discard(self, call_id: str) -> None:
        """Let go of the value of a kept result; the rest of it stays."""
        stored = self._results.get(call_id)
        if stored is not None and stored[1].ok:
            gone = Persistence(decision="link", ref=f"payload:{call_id}", reason="discarded by its caller")
            self._results[call_id] = stored[0], replace(stored[1], value=None, persistence=gone)

    async def close(self, within_s: float) -> None:
        """Let the calls end; after the given time they are cut off, which is on record."""
        tasks = [task for _, _, task in self._running.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _owner(caller: Caller) -> Owner:
    return caller.tenant, caller.id
