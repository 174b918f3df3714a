"""Tickets as people read them, and what a refusal to let somebody decide tells them to do instead."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Ticket
    from interlock.call.context import Caller
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page
    from interlock.cli.viewer import Viewer
    from interlock.core.errors import Failure

Json = dict[str, Any]


def short(ticket: Ticket) -> str:
    return f"#{ticket.id[-6:].lower()}"


def asker(viewer: Viewer, ticket: Ticket) -> str:
    """The requester, and the person on whose behalf."""
    agent = viewer.name_of(ticket.requester)
    return agent if ticket.requester == ticket.caller else f"{agent} for {viewer.name_of(ticket.caller)}"


def outlook(viewer: Viewer, ticket: Ticket) -> str:
    """The outcome if nobody decides."""
    from interlock.core.formatting import span

    left = f"expires in {span(ticket.expires_ms - viewer.now_ms())}"
    return f"{left}, then denied" if ticket.state == "PENDING" else left


def _lasting(ticket: Ticket) -> str:
    return "cannot be undone" if ticket.head.get("mutationClass") == "write_irreversible" else "can be undone"


async def ticket_at(server: Server, ticket_id: str) -> Ticket:
    """The ticket with this id, as a server tells of it."""
    from interlock.api.approval_documents import ticket_of

    return ticket_of(await server.get(f"/v1/approvals/{ticket_id}"))


def show_waiting(viewer: Viewer, page: Page, ticket: Ticket) -> None:
    """A call that waits, for its caller: who was asked, until when, and what to do next."""
    from interlock.api.approval_documents import grant_command
    from interlock.cli.render import WAITS, Text

    groups = " or ".join(ticket.approvers)
    page.line(
        WAITS, " ", Text("APPROVAL_REQUIRED", "bold yellow"), f"  {ticket.ref} waits for a person",
        right=outlook(viewer, ticket),
    )  # fmt: skip
    facts: list[tuple[str, Cell]] = [("ticket", ticket.id), ("because", ticket.reason)]
    if ticket.state == "PENDING":
        but = " other than you" if viewer.must_leave(ticket) else ""
        facts += [("next", f"somebody in {groups}{but}: interlock approvals approve {ticket.id}")]
        if but and ticket.requester.startswith("local:"):
            facts += [("alone", "if you are the only person on this machine, say so once: interlock approvals alone")]
    facts.append(("then", f"send the same call again, or: interlock calls resume {ticket.id}"))
    command = grant_command(ticket, viewer.name_of(ticket.requester)) if ticket.state == "PENDING" else None
    if command is not None:
        who = "they agree" if viewer.must_leave(ticket) else "to agree"
        facts.append(("ahead", f"{who} to such calls in advance: {command}"))
    page.facts(facts)


def show_brief(viewer: Viewer, page: Page, ticket: Ticket) -> None:
    """The summary of a ticket for a reviewer."""
    from interlock.cli.render import Text, value_text

    who = f"  {asker(viewer, ticket)}   {ticket.ref}"
    page.line(Text(short(ticket), "bold cyan"), who, right=outlook(viewer, ticket))
    page.facts([(name, value_text(value)) for name, value in ticket.params.items()], indent="       ")
    page.facts([("effect", f"{effects(ticket)} · {_lasting(ticket)}")], indent="       ")


def effects(ticket: Ticket) -> str:
    listed: list[Json] = ticket.preview.get("predicted_effects") or []
    return ", ".join(f"{one['operation']} {one['resource']}" for one in listed) or "not said"


def show_ticket(viewer: Viewer, page: Page, ticket: Ticket) -> None:
    """Everything a person should know before deciding."""
    from interlock.cli.render import Text

    is_open = ticket.state in ("PENDING", "APPROVED")
    page.line(
        Text(ticket.id, "bold"), "   ", Text(ticket.state, "yellow" if is_open else "bold"),
        right=outlook(viewer, ticket) if is_open else "",
    )  # fmt: skip
    facts: list[tuple[str, Cell]] = [
        ("call", f"{ticket.ref}   {ticket.call}"),
        ("asked by", asker(viewer, ticket)),
        ("because", ticket.reason),
    ]
    if ticket.operation != "invoke":
        facts.append(("to", f"{ticket.operation} an earlier call"))
    page.facts(facts)
    page.line("  the input" if ticket.changed is None else "  the input, and what its reviewer changed")
    page.facts(_input(ticket), indent="    ")
    would = "what it would do" if ticket.changed is None else "what it would do as changed"
    page.line(f"  {would}", right=_lasting(ticket))
    _show_preview(page, ticket.agreed_preview)
    page.facts(_people(viewer, ticket))


def _input(ticket: Ticket) -> list[tuple[str, Cell]]:
    """Every argument, and what a reviewer made of it."""
    from interlock.cli.render import value_text

    changes = ticket.differences()
    names = dict.fromkeys((*ticket.params, *changes))
    return [
        (name, " → ".join(map(value_text, changes[name])) if name in changes else value_text(ticket.params[name]))
        for name in names
    ]


def show_edit(page: Page, ticket: Ticket) -> None:
    """The changes of a reviewer, and the effects that the call would have now."""
    from interlock.cli.render import value_text

    changes = ticket.differences()
    page.facts(
        [(name, f"{value_text(was)} → {value_text(now)}") for name, (was, now) in changes.items()], indent="    "
    )
    page.line("  what it would do as changed", right=_lasting(ticket))
    _show_preview(page, ticket.agreed_preview)


def _show_preview(page: Page, preview: Json) -> None:
    from interlock.cli.render import BAD, GOOD, change_lines

    effects: list[Json] = preview.get("predicted_effects") or []
    for effect in effects:
        for line in change_lines(effect):
            page.line(f"    {line}")
    conditions: dict[str, bool] = preview.get("preconditions") or {}
    for name, holds in conditions.items():
        page.line("    ", GOOD if holds else BAD, f" {name}")
    if preview.get("impact"):
        page.line(f"    {preview['impact']}")
    if preview.get("estimated_cost") is not None:
        page.line(f"    costs about {preview['estimated_cost']}")


def _people(viewer: Viewer, ticket: Ticket) -> Iterator[tuple[str, Cell]]:
    """The notifications, the decision and the next step of a ticket."""
    from interlock.cli.render import clock_time
    from interlock.core.clock import iso
    from interlock.core.formatting import span

    by_channel = ", ".join(viewer.notified_channels())
    yield "told", " and ".join(ticket.approvers) + (f", by {by_channel}" if by_channel else "")
    if ticket.state == "PENDING":
        now_ms = viewer.now_ms()
        due = [(step.group, ticket.created_ms + step.after_ms) for step in ticket.chain[ticket.step + 1 :]]
        later = [f"{group} in {span(at_ms - now_ms)}" for group, at_ms in due if at_ms < ticket.expires_ms]
        if later:
            yield "then", ", ".join(later)
    for one in viewer.undelivered():
        again = f"; again at {clock_time(one['next_attempt_at'])}" if one["next_attempt_at"] else ""
        yield "not told", f"by {one['channel']}, {one['attempts']} times: {one['error']}{again}"
    if ticket.resolved_ms is not None:
        verb = "agreed" if ticket.state != "DENIED" else "said no"
        changed = ", with the input edited" if ticket.edited is not None else ""
        comment = f": {ticket.comment}" if ticket.comment else ""
        who = viewer.name_of(ticket.resolved_by or "")
        yield "decided", f"{who} {verb} at {clock_time(iso(ticket.resolved_ms))}{changed}{comment}"
    if ticket.state == "PENDING":
        yield "decide", f"interlock approvals approve {ticket.id}"
        yield "", f"interlock approvals deny {ticket.id} --comment 'why'"
    elif ticket.state == "APPROVED":
        yield "next", onward(viewer, ticket)


def onward(viewer: Viewer, ticket: Ticket, within: str = "") -> str:
    """The way in which an approved call continues."""
    if viewer.continues():
        by_itself = "a server on this data directory continues it; the same call then answers with the result"
        return f"{by_itself}. Without a server: interlock calls resume {ticket.id}"
    return f"the same call again{within}, or: interlock calls resume {ticket.id}"


def document(viewer: Viewer, ticket: Ticket) -> Json:
    return {
        **ticket.document(),
        "mutation_class": ticket.head.get("mutationClass"),
        "told": viewer.notified_channels(),
        "undelivered": viewer.undelivered(),
    }


async def concerns(app: Interlock, ticket: Ticket, who: Caller) -> bool:
    """Whether a ticket is somebody's affair: they asked for it or may decide on it, and their token covers the call."""
    from interlock.api.approvals import shows

    return await shows(app, ticket, who)


# Deciding


def parse_changes(given: Any) -> Json:
    """The arguments that a reviewer wants changed."""
    if not isinstance(given, dict) or not given:
        raise click.UsageError("""edit: write the arguments to change as a JSON object: '{"to": "…"}'""")
    return given  # pyright: ignore[reportUnknownVariableType] - what JSON holds


async def decided(app: Interlock, ticket_id: str, by: Caller, decision: Awaitable[Ticket]) -> Ticket:
    """The ticket as decided; a refusal says who can decide instead."""
    from interlock.core.errors import Failure

    try:
        return await decision
    except Failure as failure:
        if failure.code != "E3206":
            raise
        raise await refusal(app, failure, (await app.approvals.show(ticket_id)).approvers, by) from None


async def refusal(app: Interlock, failure: Failure, groups: tuple[str, ...], by: Caller) -> Failure:
    from interlock.core.errors import Failure

    listed = {group: await _members(app, group, by) for group in groups}
    members = "; ".join(f"in {group}: {', '.join(found) or 'nobody yet'}" for group, found in listed.items())
    resolution = failure.resolution
    return Failure(failure.code, f"{failure.in_full} ({members})", details=failure.details, resolution=resolution)


async def _members(app: Interlock, group: str, by: Caller) -> list[str]:
    """The members of a group: entries of principals.toml, then registered people.

    A caller of another tenant is told the names of that tenant only.
    """
    people = [one for one in await app.identities.all() if one.kind == "human" and one.state == "active"]
    if by.tenant != "local":
        own = [one.name or one.did for one in people if one.tenant == by.tenant and group in one.groups]
        return [*own, "local operators"]
    entries = app.policy.entries
    listed = [entry.id for entry in entries if group in entry.groups and entry.kind in (None, "human")]
    return [*listed, *(one.name or one.did for one in people if group in one.groups)]
