"""Background work: expiry, retirement of versions, tickets, and the state of upstreams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from interlock.api.home_health import Condition
from interlock.authority import budgets
from interlock.core.threads import DISK
from interlock.gateway.reconcile import close_dead_calls
from interlock.store import facts, payloads
from interlock.store.inspection import has_sandboxed_tools

if TYPE_CHECKING:
    from interlock.approvals.notify import Courier
    from interlock.core.clock import Clock
    from interlock.core.supervise import Supervisor
    from interlock.gateway.approval.resume import ApprovedCalls
    from interlock.registry.retirement import Milestone
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.store.instance import Instance
    from interlock.store.port import Store, Transaction
    from interlock.store.readers import Readers
    from interlock.telemetry.alerts import Alerts
    from interlock.upstreams.manager import Upstreams

_log = logging.getLogger("interlock.background")

# How soon what time brings to tickets is noticed; that they expire holds without anybody noticing.
TICKETS_EVERY_S = 1.0
# How often a process checks whether housekeeping is due, which is once an hour for all processes on a home together.
HOUSE_EVERY_S = 600.0
# How often a server checks whether a scheduled backup is due.
BACKUP_EVERY_S = 60.0
# How often the disk and the keys of the home are looked at.
CONDITION_EVERY_S = 10.0


class BackgroundTasks:
    """The background tasks of one process on a data directory. `upstreams` returns the upstreams on first use."""

    def __init__(
        self,
        *,
        home: Home,
        journal: Store,
        clock: Clock,
        settings: Settings,
        sweep_tickets: Callable[[], Awaitable[None]],
        approved_calls: Callable[[], ApprovedCalls],
        courier: Courier,
        upstreams: Callable[[], Upstreams],
        announce: Callable[..., None],
        write_unrecorded: Callable[[], Awaitable[None]],
        release_pieces: Callable[[Callable[[str], bool]], Awaitable[None]],
        cancel_requested: Callable[[], Awaitable[None]],
        instance: Instance,
        alerts: Alerts,
        supervisor: Supervisor,
        secret: Callable[[str], Awaitable[list[str]]],
    ) -> None:
        self._home = home
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._sweep = sweep_tickets
        self._approved_calls = approved_calls
        self._courier = courier
        self._upstreams = upstreams
        self._announce = announce
        self._write_unrecorded = write_unrecorded
        self._release_pieces = release_pieces
        self._cancel_requested = cancel_requested
        self._instance = instance
        self._secret = secret
        self._condition = Condition(home, alerts, announce)
        if settings.housekeeping:
            self._begin(supervisor)

    def _begin(self, supervisor: Supervisor) -> None:
        """Start the jobs. Each is a task of its own, so that one that fails or takes long keeps no other from running.

        The end of the journal is signed with the next write; where none comes, a job sees to it.
        """
        supervisor.every("housekeeping", HOUSE_EVERY_S, self._maintain_if_due)
        supervisor.every("recording of owed outcomes", TICKETS_EVERY_S, self._write_unrecorded)
        supervisor.every("requests of other processes", TICKETS_EVERY_S, self._cancel_requested)
        supervisor.every("calls of dead processes", TICKETS_EVERY_S, self.close_dead_calls)
        supervisor.every("pieces of payloads", TICKETS_EVERY_S, self._remove_pieces)
        supervisor.every("tickets", TICKETS_EVERY_S, self._sweep_tickets)
        if self._settings.resume_approved:
            supervisor.every("approved calls", TICKETS_EVERY_S, self._resume_approved)
        if self._settings.backup_to is not None and self._settings.resume_approved:  # in a server, not in a command
            supervisor.every("backups", BACKUP_EVERY_S, self._back_up_if_due)
        supervisor.every("signing of the journal", TICKETS_EVERY_S, self._sign_journal)
        supervisor.every("condition of the data directory", CONDITION_EVERY_S, self._condition.look, at_once=False)
        supervisor.every("probing of upstreams", self._settings.upstream_probe_s, self._probe_upstreams, at_once=False)

    async def maintain(self) -> list[Milestone]:
        """Remove expired data and retire versions that are due. Runs by itself once an hour."""
        from interlock.audit.retention import expire_payloads
        from interlock.gateway import idempotency
        from interlock.registry.retirement import sweep
        from interlock.resilience import limits
        from interlock.store import surfaces

        evictions = (
            (idempotency.evict, idempotency.EVICT_AT_ONCE),
            (budgets.evict, budgets.EVICT_AT_ONCE),
            (limits.evict, limits.EVICT_AT_ONCE),
        )
        for evict, at_once in evictions:
            while await self._journal.commit(evict) == at_once:
                pass
        await self._journal.commit(surfaces.sweep)
        await self._release_pieces(self._instance.alive)
        await expire_payloads(self._journal)
        if self._settings.purge_records and await self._journal.commit(_purge_due):
            await DISK.run(self._purge, await self._store_ms(), await self.archive_credential())
        if self._settings.archive_to and await self._journal.commit(_archive_due):
            await self._archive_checkpoints()
        days = self._settings.deprecation_extend_days
        now_ms = self._clock.now_ms()
        milestones = await sweep(self._journal, now_ms, by="housekeeping", force=days == 0, extend_days=days)
        for one in milestones:
            self._announce(one.event, "", one.tool)
        return milestones

    async def archive_credential(self) -> str:
        """The stored credential for the object store; empty where the environment has it."""
        name = self._settings.archive_secret
        return (await self._secret(name))[0] if name else ""

    async def _archive_checkpoints(self) -> None:
        from interlock.audit.archiving import archive_checkpoints

        now_ms = await self._store_ms()
        until_ms = now_ms - self._settings.checkpoint_days * 86_400_000
        credential = await self.archive_credential()
        await archive_checkpoints(
            self._journal,
            self._settings.archive_to,
            until_ms=until_ms,
            now_ms=now_ms,
            by="housekeeping",
            credential=credential,
        )

    def _purge(self, now_ms: int, credential: str) -> None:
        """Remove the records that are past their term and give the space back. Long: runs in a thread, in slices."""
        from interlock.audit import retention

        if retention.due(self._home, self._settings, now_ms=now_ms, through=1):
            retention.purge(self._home, self._settings, now_ms=now_ms, by="housekeeping", credential=credential)
            retention.shrink(self._home)

    async def _maintain_if_due(self) -> None:
        if await self._journal.commit(_maintenance_due):
            await self.maintain()

    async def _back_up_if_due(self) -> None:
        from interlock.audit import backups

        if not await self._journal.commit(partial(backups.due, every_ms=self._settings.backup_every_ms)):
            return
        now = datetime.fromtimestamp(await self._store_ms() / 1000, UTC)
        try:
            make = partial(backups.make, credential=await self.archive_credential())
            made = await DISK.run(make, self._home, self._settings, now)
        except Exception:
            await self._journal.commit(backups.note_failed)
            raise
        await self._journal.commit(partial(backups.note_made, blocked=made.blocked))
        _log.info("backup of %d records made at %s", made.verdict.records, made.place)

    async def _store_ms(self) -> int:
        """The store's time, by which what lasts is named and removed: the machine's clock may be wrong."""
        return await self._journal.commit(lambda transaction: transaction.now_ms)

    async def close_dead_calls(self) -> None:
        """Close the calls of processes that have died. Runs by itself, and when somebody asks about such a call."""
        await close_dead_calls(self._journal, self._instance, self._announce)

    async def _remove_pieces(self) -> None:
        await self._release_pieces(self._instance.alive)
        if not await self._journal.read(payloads.has_released):
            return
        from interlock.audit.retention import remove_pieces  # most commands have none to remove

        await remove_pieces(self._journal)

    async def _resume_approved(self) -> None:
        await self._approved_calls().resume_all()

    async def _sweep_tickets(self) -> None:
        await self._sweep()
        await self._courier.wake()

    async def _sign_journal(self) -> None:
        if self._journal.unsigned:
            await self._journal.commit(_sign)

    async def _probe_upstreams(self) -> None:
        await self._upstreams().probe_all()


async def open_sandbox(readers: Readers, warm_up: Callable[[], Awaitable[None]], after_s: float) -> None:
    """Open the sandbox where the data directory has tools that need it, after a while."""
    await asyncio.sleep(after_s)
    if await readers.read(has_sandboxed_tools):
        await warm_up()


def _sign(_: Transaction) -> None:
    """Nothing of its own: what is committed late enough takes a signature along."""


def _maintenance_due(transaction: Transaction) -> bool:
    """Whether an hour has passed since any process on this data directory ran maintenance; if so, this one does."""
    return _turn(transaction, "maintained_ms", 3_600_000)


def _purge_due(transaction: Transaction) -> bool:
    """The same for removing records, which verifies the whole journal first and is done once a day."""
    return _turn(transaction, "purged_ms", 86_400_000)


def _archive_due(transaction: Transaction) -> bool:
    """The same for moving old checkpoints to the archive, once a day."""
    return _turn(transaction, "archived_ms", 86_400_000)


def _turn(transaction: Transaction, name: str, every_ms: int) -> bool:
    last = facts.get(transaction, name)
    if last is not None and transaction.now_ms - int(last) < every_ms:
        return False
    facts.put(transaction, name, str(transaction.now_ms))
    return True
