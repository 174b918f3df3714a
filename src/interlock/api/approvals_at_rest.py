"""Reads of tickets and approvals in a data directory that is not opened, as in `at_rest`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.parts import Parts
    from interlock.approvals.standing import Standing
    from interlock.approvals.ticket import Ticket
    from interlock.data.schema import Json
    from interlock.store.port import Reader
    from interlock.store.sealing import Box


def tickets(reader: Reader, path: Path, *, every: bool) -> list[Ticket] | None:
    """Tickets that wait, oldest first; with `every` all of them, newest first."""
    from interlock.approvals.tickets import listing

    found = listing(reader, every=every)
    if not found:
        return []
    box = _box(path)
    return None if box is None else [one.opened(box) for one in found]


def ticket(reader: Reader, path: Path, ticket_id: str) -> Ticket | None:
    """The ticket of this id, or the only one whose id begins or ends so; E3702 if there is no such one."""
    from interlock.approvals.tickets import load

    box = _box(path)
    return None if box is None else load(reader, ticket_id).opened(box)


def _box(path: Path) -> Box | None:
    """The box that opens sealed parts of tickets; None if the settings may name another place for its keys."""
    from interlock.store.home import Home

    home = Home(path)
    if home.settings.exists() or "INTERLOCK_SECRETS_KEY" in os.environ:
        return None
    from interlock.store.sealing import Box

    return Box(home.keys)


def must_leave(reader: Reader, ticket: Ticket) -> bool:
    """Whether the local user asked for a ticket, and so has to leave the decision to others."""
    from interlock.api.local_user import local_user
    from interlock.approvals.reviewers import is_alone
    from interlock.call.context import Caller

    person = Caller(id=f"local:{local_user()}")
    return ticket.requester == person.id and not is_alone(reader, person)


async def messages_of(parts: Parts, ticket_id: str) -> tuple[list[str], list[Json]]:
    """The same as `messages_about`, of an open data directory."""
    return await parts.journal.read(lambda reader: messages_about(reader, ticket_id))


def messages_about(reader: Reader, ticket_id: str) -> tuple[list[str], list[Json]]:
    """The channels by which people were notified of a ticket, and the notifications that did not arrive."""
    from interlock.core.clock import iso
    from interlock.store import notifications

    late = [
        {
            "channel": one.channel,
            "step": one.step,
            "state": one.state,
            "attempts": one.attempts,
            "next_attempt_at": None if one.state == "failed" else iso(one.next_ms),
            "error": one.error,
        }
        for one in notifications.undelivered(reader, ticket_id, 50)
    ]
    return notifications.sent_channels(reader, ticket_id), late


def standing_approvals(reader: Reader) -> list[Standing]:
    """Every standing approval."""
    from interlock.approvals.standing import listing

    return listing(reader)
