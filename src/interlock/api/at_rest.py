"""What commands show of a data directory that is not opened, read from its database alone.

Opening one loads every part of the gateway, which takes most of the time of a command that only looks. So each function
imports what it needs. None checks rights: who can read the files may read the database. None is returned where only an
open data directory can tell.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.approvals.standing import Standing
    from interlock.approvals.ticket import Ticket
    from interlock.data.schema import Json
    from interlock.store.port import Reader
    from interlock.store.sealing import Box
    from interlock.store.secrets import CredentialEntry


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
    from interlock.api.authority import local_user
    from interlock.approvals.reviewers import is_alone
    from interlock.call.context import Caller

    person = Caller(id=f"local:{local_user()}")
    return ticket.requester == person.id and not is_alone(reader, person)


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


def names(reader: Reader) -> dict[str, tuple[str, str]]:
    """The name and the tenant of each identity that has a name, by DID."""
    from interlock.store.identities import all_identities

    return {one.did: (one.name, one.tenant) for one in all_identities(reader) if one.name}


def quarantined(reader: Reader) -> list[Json]:
    """The versions that are or were in quarantine, each with the reason."""
    from interlock.registry.quarantine import every_entry

    return [one.document() for one in every_entry(reader)]


def upstreams(reader: Reader) -> Json | None:
    """Every upstream with its tools. None while a service is left alone: how long, open parts tell."""
    from interlock.store import breakers
    from interlock.store import upstreams as stored

    if breakers.impaired(reader):
        return None
    known: list[Json] = []
    if stored.every(reader):
        from interlock.upstreams.repository import documents

        known = documents(reader)
    return {"upstreams": known, "services": []}


def upstream(reader: Reader, name: str) -> Json | None:
    """One upstream with its tools. None also if a tool changed: the difference to its contract, open parts tell."""
    from interlock.store import breakers
    from interlock.store import upstreams as stored

    if breakers.impaired(reader) or stored.find(reader, name) is None:
        return None
    from interlock.upstreams.repository import documents

    (document,) = documents(reader, name)
    changed = any(tool["state"] == "changed" for tool in document["tools"])
    return None if changed else {**document, "services": []}


def credentials(reader: Reader, path: Path) -> list[CredentialEntry] | None:
    """The stored credentials, without values. None if principals.toml was changed: it says who may list them."""
    from interlock.authority.default_principals import unchanged
    from interlock.store import secrets
    from interlock.store.home import Home

    return secrets.entries(reader) if unchanged(Home(path).principals) else None
