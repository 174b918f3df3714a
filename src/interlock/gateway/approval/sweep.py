"""Denies or escalates tickets when their time has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.store.tickets import any_open

if TYPE_CHECKING:
    from interlock.approvals.tickets import Channels, Happening
    from interlock.gateway.observe import Observer
    from interlock.store.port import Store


async def sweep(journal: Store, channels: Channels, observer: Observer) -> list[Happening]:
    """Deny tickets that have timed out, and escalate those that wait too long."""
    if not await journal.read(any_open):
        return []
    from interlock.approvals import tickets  # most data directories have no open ticket when a command looks

    happened = await journal.commit(tickets.sweep(channels))
    for one in happened:
        observer.announce(one.event, one.ticket.call, one.ticket.ref, **one.ticket.pending())
    return happened
