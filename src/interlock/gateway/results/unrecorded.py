"""Write the outcomes of writes, and keep those that the journal could not take yet.

The effect of a write stands whether or not its record can be written (a full disk, a locked database). A closing that
fails is kept here and committed before the next one, so that the journal says in the end how every write ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

from interlock.call.phases import Call
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.gateway import idempotency, reconcile
from interlock.gateway.observe import Observer
from interlock.store import records
from interlock.store.port import Store, Transaction, Unit

T = TypeVar("T")
_log = logging.getLogger("interlock.gateway")


class UnrecordedOutcomes:
    """Commits closings. Those that could not be written are committed first at the next opportunity."""

    def __init__(self, journal: Store, clock: Clock, observer: Observer) -> None:
        self._journal = journal
        self._clock = clock
        self._observer = observer
        # The outcomes that could not be recorded yet, oldest first.
        self.waiting: list[tuple[Call, Unit[Any]]] = []
        self._writing = asyncio.Lock()

    async def write(self, call: Call, unit: Unit[T]) -> T:
        """Commit the closing of a call that may have changed something. Returns what its unit returned.

        If it cannot be written now, the effect stands and the closing is kept, to be written before the next one. The
        caller gets a failure that says that the outcome is not on record. An error that the store did not
        raise is raised again when a second attempt meets it too: what the tool reported cannot be written at all.
        """
        try:
            if self.waiting:
                await asyncio.shield(self.write_all())
            return await self._twice(call, unit)
        except Failure as failure:
            if failure.code == "E3410" or call.more.scope is None:
                raise
            self.waiting.append((call, unit))
            _log.error("the outcome of call %s could not be recorded: %s", call.id, failure.message)
            raise Failure(
                "E3409",
                f"the call was carried out, but the journal could not record how it ended: {failure.message}",
                details={"invocation_id": call.id, "executed": True},
            ) from failure

    async def _twice(self, call: Call, unit: Unit[T]) -> T:
        """Commit a unit. After an unexpected error try once more. Cancelling the caller does not stop the commit."""
        try:
            return await self._journal.submit(unit)
        except Failure:
            raise
        except Exception as error:  # noqa: BLE001 - a second error is raised
            _log.error("the closing of call %s failed", call.id, exc_info=error)
            return await self._journal.submit(unit)

    def commit_or_retry(self, call: Call, unit: Unit[Any]) -> None:
        """Commit a unit without waiting for it. If it cannot be written now, it is written later, like a closing."""

        def note(written: asyncio.Future[Any]) -> None:
            if not written.cancelled() and written.exception() is not None:
                self.waiting.append((call, unit))

        asyncio.ensure_future(self._journal.commit(unit)).add_done_callback(note)

    async def write_all(self) -> None:
        """Write the closings that were kept, oldest first, for as long as the journal takes them."""
        async with self._writing:
            while self.waiting:
                call, unit = self.waiting[0]
                try:
                    await self._twice(call, unit)
                except Exception as error:  # noqa: BLE001 - one closing that cannot be written must not keep the rest
                    if isinstance(error, Failure) and error.code != "E3410":
                        return
                    # Its session has moved on, or its closing cannot be written at all. What it did stands, and a
                    # person must look.
                    if await self._journal.commit(_as_unknown(call, self._clock)):
                        self.alert_unknown(call)
                del self.waiting[0]

    def alert_unknown(self, call: Call) -> None:
        """Alert that nobody can say whether a call took effect."""
        self._observer.alert("OUTCOME_UNKNOWN", call, reason=reconcile.advice(call.id))


def _as_unknown(call: Call, clock: Clock) -> Unit[bool]:
    """Return a unit that blocks the key of a call that is still open and closes the call. It returns whether it was."""
    failure = Failure("E3409", "how the call ended could not be recorded")
    body = records.ended(call, clock.now_ms(), failure, "unknown", call.latency_ms(clock.monotonic()))

    def unit(transaction: Transaction) -> bool:
        if call.more.scope is None or not idempotency.is_open(transaction, call.more.scope, call.id):
            return False
        idempotency.settle(transaction, call.more.scope, call.id, "unknown", None)
        if not transaction.has("closed", call.id):
            transaction.append("closed", call.id, body)
        return True

    return unit
