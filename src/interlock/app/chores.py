"""What time brings, looked after in the background: expiry, retirement, tickets, upstreams that come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from interlock.approvals.notify import Courier
from interlock.audit.retention import expire_payloads
from interlock.authority import budgets
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.gateway import keys
from interlock.gateway.desk import Desk
from interlock.gateway.reconcile import block_orphans
from interlock.resilience import limits
from interlock.settings import Settings
from interlock.store.journal import Journal, Transaction

if TYPE_CHECKING:
    from interlock.registry.retirement import Milestone
    from interlock.upstreams.manager import Upstreams

_log = logging.getLogger("interlock.app")

# How soon what time brings to tickets is noticed; that they expire holds without anybody noticing.
TICKETS_EVERY_S = 1.0


class Chores:
    """The chores of one process on a home. `upstreams` gives them when they are first looked at."""

    def __init__(
        self,
        *,
        journal: Journal,
        clock: Clock,
        settings: Settings,
        approvals: Desk,
        courier: Courier,
        upstreams: Callable[[], Upstreams],
        announce: Callable[..., None],
        pay: Callable[[], Awaitable[None]],
        heed: Callable[[], Awaitable[None]],
        alive: Callable[[str], bool],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._approvals = approvals
        self._courier = courier
        self._upstreams = upstreams
        self._announce = announce
        self._pay = pay
        self._heed = heed
        self._alive = alive
        chores = (self._keep_house(), self._keep_time(), self._keep_watch()) if settings.housekeeping else ()
        self._tasks = [asyncio.create_task(chore) for chore in chores]

    async def close(self) -> None:
        """Leave it all to the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def maintain(self) -> list[Milestone]:
        """Let go of what has expired and retire versions whose time has come. Runs by itself once an hour."""
        for evict, at_once in _EVICTIONS:
            while await self._journal.commit(evict) == at_once:
                pass
        await self._journal.commit(expire_payloads)
        from interlock.registry.retirement import sweep

        milestones = await sweep(self._journal, self._clock.now_ms(), by="housekeeping")
        for one in milestones:
            self._announce(one.event, "", one.tool)
        return milestones

    async def _keep_house(self) -> None:
        while True:
            try:
                if await self._journal.commit(_maintenance_due):
                    await self.maintain()
            except Failure as failure:  # a full disk, a held lock: there is always a next time
                _log.warning("housekeeping was put off: %s", failure.message)
            await asyncio.sleep(600)

    async def _keep_time(self) -> None:
        """Look after tickets: expiry, escalation, telling people, and going on where this process is to do so.

        And after what other processes ask of this one, or left open when they died; after outcomes that could not be
        recorded; and after the end of the journal, which is signed with the next write: where none comes, this is it.
        """
        while True:
            try:
                await self._pay()
                await self._heed()
                await block_orphans(self._journal, self._alive, self._announce)
                await self._approvals.sweep()
                self._courier.wake()
                if self._settings.resume_approved:
                    await self._approvals.resume_all()
                if self._journal.unsigned:
                    await self._journal.commit(_sign)
            except Failure as failure:
                _log.warning("tickets were not looked after: %s", failure.message)
            await asyncio.sleep(TICKETS_EVERY_S)

    async def _keep_watch(self) -> None:
        """Ask the upstreams now and then whether they are there."""
        while True:
            await asyncio.sleep(self._settings.upstream_probe_s)
            try:
                await self._upstreams().probe_all()
            except Failure as failure:
                _log.warning("upstreams were not looked after: %s", failure.message)


_EVICTIONS = (
    (keys.evict, keys.EVICT_AT_ONCE),
    (budgets.evict, budgets.EVICT_AT_ONCE),
    (limits.evict, limits.EVICT_AT_ONCE),
)


def _sign(_: Transaction) -> None:
    """Nothing of its own: what is committed late enough takes a signature along."""


def _maintenance_due(transaction: Transaction) -> bool:
    """Whether an hour has passed since any process on this home kept house; if so, it is this one's turn."""
    row = transaction.one("SELECT value FROM fact WHERE name = 'maintained_ms'")
    if row is not None and transaction.now_ms - int(row[0]) < 3_600_000:
        return False
    transaction.execute(
        "INSERT OR REPLACE INTO fact (name, value) VALUES ('maintained_ms', ?)", (str(transaction.now_ms),)
    )
    return True
