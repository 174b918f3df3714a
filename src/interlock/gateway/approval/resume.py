"""Continue calls that were approved.

A continued call is an ordinary call with the same id: it passes all six phases again, with the authority that its
caller has now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from interlock.approvals import tickets
from interlock.approvals.ticket import Ticket
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.gateway.approval.waiting_call import WaitingCalls
from interlock.gateway.invoke import Gateway
from interlock.registry.drafts import DRAFTS
from interlock.store.port import Store

RETRY_S = 5.0
Report = Callable[[dict[str, Any]], None]


class ApprovedCalls:
    """The approved calls of one data directory that have not run yet."""

    def __init__(
        self,
        *,
        gateway: Gateway,
        waiting: WaitingCalls,
        journal: Store,
        clock: Clock,
        revive: Callable[[Caller], Awaitable[Caller]],
    ) -> None:
        self._gateway = gateway
        self._waiting = waiting
        self._journal = journal
        self._clock = clock
        self._revive = revive
        # Approved calls that could not run just now, and when to try again.
        self._retry_at: dict[str, float] = {}
        self._running: dict[str, asyncio.Future[Result]] = {}

    async def resume(self, ticket_id: str, *, on_progress: Report | None = None) -> Result:
        """Continue one call that was approved, for somebody who waits. Concurrent requests get the same answer.

        `on_progress` hears of its progress, if this is the request that continues it.
        """
        return await self._resume(ticket_id, awaited=True, on_progress=on_progress)

    async def _resume(self, ticket_id: str, *, awaited: bool, on_progress: Report | None) -> Result:
        ticket = self._waiting.open(await self._journal.read(lambda reader: tickets.load(reader, ticket_id)))
        # INVARIANT: a call that continues keeps its id, so only one attempt runs at a time.
        running = self._running.get(ticket.id)
        if running is None:
            running = self._running[ticket.id] = asyncio.ensure_future(
                self._run(ticket, awaited=awaited, on_progress=on_progress)
            )
            running.add_done_callback(lambda _: self._running.pop(ticket.id))
        return await asyncio.shield(running)

    async def resume_all(self, *, on_progress: Report | None = None) -> list[Result]:
        """Continue every call that was approved and has not run. One that cannot run now is tried again later."""
        results: list[Result] = []
        now = self._clock.monotonic()
        for ticket in await self._journal.read(tickets.approved):
            if self._retry_at.get(ticket.id, 0.0) > now:
                continue
            try:
                result = await self._resume(ticket.id, awaited=False, on_progress=on_progress)
            except Failure:
                continue  # another process was quicker
            results.append(result)
            if result.error is not None and result.error.retryable:
                self._retry_at[ticket.id] = now + max(RETRY_S, (result.error.retry_after_ms or 0) / 1000)
        return results

    async def _run(self, ticket: Ticket, *, awaited: bool, on_progress: Report | None) -> Result:
        """Run the six phases of a call that waited, with the authority that its caller has now."""
        if ticket.state != "APPROVED" or ticket.sealed is None:
            raise ticket.rejection() or Failure(
                "E3411", f"ticket {ticket.id} is {ticket.state}, so there is nothing to go on with"
            )
        request = self._waiting.request(ticket)
        assert request.caller is not None
        if request.door == DRAFTS:
            # Nobody else finds the draft: to run the call here would only end it.
            raise Failure("E3411", f"{ticket.ref} is a draft; send the call again in the session of interlock dev")
        try:
            caller = await self._revive(request.caller)
            result = await self._gateway.invoke(replace(request, caller=caller, on_progress=on_progress))
        except Failure as failure:
            result = await self._gateway.decline(request, failure)
        if result.error is not None and not result.pending and not result.error.retryable:
            await self._journal.commit(tickets.give_up(ticket.id, result.error))
        if awaited and request.own_key is None:
            await self._journal.commit(lambda transaction: tickets.mark_collected(transaction, ticket.id))
        return result
