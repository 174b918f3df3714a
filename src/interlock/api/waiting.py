"""Waiting for the end of a call: for a person's decision, or through the retries that its tool allows."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.results import Result
    from interlock.registry.version import Version


async def wait_for_decision(parts: Parts, pending: Result, *, within_s: float | None, poll_s: float) -> Result:
    """Wait until a person has decided on a pending call, and continue it; still pending when time is up."""
    ticket_id = pending.metadata["pending"]["ticketId"]
    give_up = None if within_s is None else parts.clock.monotonic() + within_s
    while pending.pending:
        await parts.approvals.sweep()
        ticket = await parts.approvals.show(ticket_id)
        if ticket.state == "APPROVED":
            try:
                return await parts.approved_calls.resume(ticket.id)
            except Failure:
                if (await parts.approvals.show(ticket_id)).state == "APPROVED":
                    raise
                continue  # another process was quicker
        failure = ticket.rejection()
        if failure is not None:
            metadata = {**pending.metadata, "approval": ticket.outcome()}
            return replace(pending, state="denied", error=failure, metadata=metadata)
        if ticket.state != "PENDING":
            break  # another process has continued it
        if give_up is not None and parts.clock.monotonic() >= give_up:
            break
        await asyncio.sleep(poll_s)
    return pending


async def retry(
    parts: Parts, version: Version, call: Callable[[float], Awaitable[Result]], *, within_s: float
) -> Result:
    """Make a call as often as the retry policy of its tool allows. `call` is given the deadline of each attempt."""
    import random

    from interlock.resilience.retry import Pacing, call_with_retries  # most commands make no call

    observer, retried = parts.observer, parts.telemetry.metrics.retried
    deadline = parts.clock.monotonic() + within_s
    pacing = Pacing(monotonic=parts.clock.monotonic, sleep=asyncio.sleep, uniform=random.uniform)
    tries = itertools.count()

    def attempt(until: float) -> Awaitable[Result]:
        if next(tries):
            retried(version.prepared)
        return call(until)

    def exhausted(result: Result, attempts: int) -> None:
        observer.announce("RETRY_BUDGET_EXHAUSTED", result.invocation_id, result.tool, attempts=attempts)

    return await call_with_retries(
        attempt,
        version.contract.manifest.retry_policy,
        pacing,
        deadline=deadline,
        on_exhausted=exhausted,
    )
