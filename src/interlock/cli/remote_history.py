"""The records of a call, read from a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from interlock.cli.history import Entry, History, in_order, tickets_in
from interlock.cli.remote import part
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.approvals.ticket import Ticket
    from interlock.cli.remote import Server


async def history_at(server: Server, call_id: str, *, with_previews: bool = False) -> History:
    """Every record of a call that the holder of the token may read; E3702 if there is none.

    With previews, also what reviewers were shown, of the tickets that the holder may see.
    """
    entries = await _entries(server, call_id)
    if not entries:
        await server.get(f"/v1/calls/{part(call_id)}")  # says that there is none
        raise Failure("E3702", f"no record of `{call_id}` in this journal")
    tickets = tickets_in(entries)
    for ticket in tickets:
        entries += await _entries(server, ticket)
    asked = await _seen(server, tickets) if with_previews else []
    return History(
        call_id,
        in_order(call_id, entries),
        {ticket.id: ticket.preview for ticket in asked},
        {ticket.id: ticket.agreed_preview for ticket in asked if ticket.changed is not None},
    )


async def _entries(server: Server, about: str) -> list[Entry]:
    """Every record of a call or a ticket."""
    found: list[Entry] = []
    after: int | None = 0
    while after is not None:
        told = await server.get("/v1/audit/records", call=about, after=after)
        found += [Entry(one["seq"], one["hash"], one["record"]) for one in told["records"]]
        after = told["after"]
    return found


async def _seen(server: Server, ids: Iterable[str]) -> list[Ticket]:
    """Those of the tickets that the holder of the token may see."""
    from interlock.cli.restored import ticket_of

    found: list[Ticket] = []
    for one in sorted(ids):
        try:
            found.append(ticket_of(await server.get(f"/v1/approvals/{part(one)}")))
        except Failure as failure:
            if failure.code != "E3702":
                raise
    return found
