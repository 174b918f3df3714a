"""`interlock approvals`: what waits for a person, what it would do, and the person's word on it.

The local user decides, or the holder of the token that is given. With a token one sees the tickets that are
one's own affair: those one asked for, and those one's groups were asked about.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import acting, as_holder, at_rest, at_server, over_home
from interlock.cli.output import Output
from interlock.cli.standing_approvals import alone, grant, list_standing, revoke
from interlock.cli.tickets import (
    asker,
    concerns,
    decided,
    document,
    effects,
    onward,
    parse_changes,
    show_edit,
    show_ticket,
)
from interlock.cli.values import parse_json
from interlock.cli.viewer import AtRest, Local, Remote, Viewer

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader, Ticket
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.group(short_help="Calls that wait for a person: agree, change or refuse.")
def approvals() -> None:
    """Calls that wait for a person: see what they would do, then agree, change or refuse.

    IDs may be shortened to a beginning or an ending, as long as only one ticket fits.

    \b
    interlock approvals list
    interlock approvals show 7859c2
    interlock approvals approve 7859c2 --comment 'as agreed'
    """


for _command in (grant, alone, list_standing, revoke):
    approvals.add_command(_command)


# Looking


async def _list_at_server(server: Server, out: Output, /, every: bool) -> int:
    from interlock.api.approval_documents import ticket_of

    document = await server.get("/v1/approvals", all="true" if every else None)
    found = [ticket_of(one) for one in document["tickets"]]
    return _answer_list(out, await Remote.of(server), found, _NONE[every, True])


def _list_at_rest(reader: Reader, out: Output, /, every: bool) -> int | None:
    from interlock.api.approvals_at_rest import tickets

    found = tickets(reader, out.session.path, every=every)
    if found is None:
        return None
    return _answer_list(out, AtRest(reader, out.session.path), found, _NONE[every, False])


@approvals.command("list")
@at_server(_list_at_server)
@at_rest(_list_at_rest)
@click.option("--all", "every", is_flag=True, help="Those that were decided too, newest first.")
@as_holder
@over_home
async def list_tickets(app: Interlock, out: Output, /, every: bool, token: str | None) -> int:
    """Calls that wait for a decision, oldest first.

    \b
    interlock approvals list
    interlock approvals list --all --json
    """
    who = None if token is None else await acting(app, token)
    found = [one for one in await app.approvals.list(every=every) if who is None or await concerns(app, one, who)]
    return _answer_list(out, await Local.of(app), found, _NONE[every, who is not None])


def _answer_list(out: Output, viewer: Viewer, tickets: list[Ticket], none: str) -> int:
    def show(page: Page) -> None:
        from interlock.core.formatting import span

        now_ms = viewer.now_ms()
        rows = [
            (
                one.id,
                asker(viewer, one),
                one.ref,
                one.state if one.state != "PENDING" else f"{span(one.expires_ms - now_ms)} left",
                str(one.preview.get("impact") or effects(one)),
            )
            for one in tickets
        ]
        if rows:
            page.table(rows, ("ticket", "who asks", "tool", "state", "impact"))
        else:
            page.line(none)

    out.answer({"tickets": [one.document() for one in tickets]}, show)
    return 0


# Words for an empty list, by whether it has decided tickets as well, and whether the caller sees their own only.
_NONE = {
    (True, False): "nobody has asked for anything yet",
    (False, False): "nothing waits for a person",
    (True, True): "nothing was asked of you, or by you",
    (False, True): "nothing waits for you",
}


async def _show_at_server(server: Server, out: Output, /, ticket_id: str) -> int:
    from interlock.api.approval_documents import ticket_of
    from interlock.cli.remote import part

    found = await server.get(f"/v1/approvals/{part(await _whole_id(server, ticket_id))}")
    ticket, viewer = ticket_of(found), await Remote.of(server, found)
    out.answer(document(viewer, ticket), lambda page: show_ticket(viewer, page, ticket))
    return 0


async def _whole_id(server: Server, given: str) -> str:
    """The id of the only ticket that begins or ends so; as it was given where a server must say that there is none."""
    document = await server.get("/v1/approvals", all="true")
    ids = [str(one["id"]) for one in document["tickets"]]
    part = given.strip("#…. ").upper().removeprefix("APR_")
    fitting = [one for one in ids if one[4:].startswith(part) or one.endswith(part)] if len(part) >= 4 else []
    return fitting[0] if given not in ids and len(fitting) == 1 else given


def _show_at_rest(reader: Reader, out: Output, /, ticket_id: str) -> int | None:
    from interlock.api.approvals_at_rest import ticket as ticket_at_rest

    ticket = ticket_at_rest(reader, out.session.path, ticket_id)
    if ticket is None:
        return None
    viewer = AtRest(reader, out.session.path, ticket)
    out.answer(document(viewer, ticket), lambda page: show_ticket(viewer, page, ticket))
    return 0


@approvals.command(short_help="One ticket: who asks, with what, and what it would change.")
@at_server(_show_at_server)
@at_rest(_show_at_rest)
@click.argument("ticket_id", metavar="ID")
@as_holder
@over_home
async def show(app: Interlock, out: Output, /, ticket_id: str, token: str | None) -> int:
    """One ticket: who asks, with which input, what it would change, who was told, and what was decided.

    \b
    interlock approvals show 7859c2
    """
    from interlock.api.approvals import visible_ticket

    who = None if token is None else await acting(app, token)
    ticket = await visible_ticket(app, ticket_id, by=who)
    viewer = await Local.of(app, ticket)
    out.answer(document(viewer, ticket), lambda page: show_ticket(viewer, page, ticket))
    return 0


# Deciding


def _edit(_: click.Context, __: click.Parameter, value: str | None) -> Json | None:
    return None if value is None else parse_changes(parse_json(value, "edit"))


async def _approve_at_server(server: Server, out: Output, /, ticket_id: str, comment: str, edit: Json | None) -> int:
    return await _decide_at_server(server, out, ticket_id, "approve", {"comment": comment, "edit": edit})


async def _deny_at_server(server: Server, out: Output, /, ticket_id: str, comment: str) -> int:
    return await _decide_at_server(server, out, ticket_id, "deny", {"comment": comment})


async def _decide_at_server(server: Server, out: Output, ticket_id: str, verb: str, decision: Json) -> int:
    from interlock.api.approval_documents import ticket_of
    from interlock.cli.remote import part

    path = f"/v1/approvals/{part(await _whole_id(server, ticket_id))}"
    await server.post(f"{path}/{verb}", decision)
    found = await server.get(path)
    ticket, viewer = ticket_of(found), await Remote.of(server, found)
    out.answer(document(viewer, ticket), lambda page: _show_decision(viewer, page, ticket))
    return 0


@approvals.command(short_help="Agree to one call, once, as it is or as you change it.")
@at_server(_approve_at_server)
@click.argument("ticket_id", metavar="ID")
@click.option("--comment", default="", help="What you have to say about it; it goes on record.")
@click.option("--edit", metavar="JSON", callback=_edit, help="Agree with these arguments changed; null takes one out.")
@as_holder
@over_home
async def approve(
    app: Interlock, out: Output, /, ticket_id: str, comment: str, edit: Json | None, token: str | None
) -> int:
    """Agree to one call, once: to the very input that was shown, or to the input as you change it.

    \b
    interlock approvals approve 7859c2
    interlock approvals approve 7859c2 --edit '{"to": "desk@example.org"}' --comment 'internally first'
    """
    by = await acting(app, token)
    ticket = await decided(app, ticket_id, by, app.approvals.approve(ticket_id, by=by, comment=comment, edit=edit))
    viewer = await Local.of(app, ticket)
    out.answer(document(viewer, ticket), lambda page: _show_decision(viewer, page, ticket))
    return 0


@approvals.command()
@at_server(_deny_at_server)
@click.argument("ticket_id", metavar="ID")
@click.option("--comment", default="", help="Why. The caller sees it.")
@as_holder
@over_home
async def deny(app: Interlock, out: Output, /, ticket_id: str, comment: str, token: str | None) -> int:
    """Say no. The call ends and nothing is run.

    \b
    interlock approvals deny 7859c2 --comment 'not before Monday'
    """
    by = await acting(app, token)
    ticket = await decided(app, ticket_id, by, app.approvals.deny(ticket_id, by=by, comment=comment))
    viewer = await Local.of(app, ticket)
    out.answer(document(viewer, ticket), lambda page: _show_decision(viewer, page, ticket))
    return 0


def _show_decision(viewer: Viewer, page: Page, ticket: Ticket) -> None:
    from interlock.cli.render import GOOD, Text

    word = "approved" if ticket.state == "APPROVED" else "denied"
    changed = ", with the input edited" if ticket.edited is not None else ""
    by = viewer.name_of(ticket.resolved_by or "")
    page.line(GOOD, " ", Text(ticket.ref, "bold"), f"   {word} by {by}{changed}", right=ticket.comment or "")
    if ticket.changed is not None:
        show_edit(page, ticket)
    if ticket.state == "APPROVED":
        from interlock.core.formatting import span

        within = f" within {span(ticket.expires_ms - viewer.now_ms())}"
        page.facts([("next", onward(viewer, ticket, within))])


# Watching


def _patience(_: click.Context, __: click.Parameter, value: float | None) -> float:
    if value is not None and not value > 0:
        raise click.BadParameter("must be a number of seconds above 0")
    return math.inf if value is None else value


async def _watch_at_server(server: Server, out: Output, /, for_s: float) -> int:
    from interlock.cli.watch import ServerTickets
    from interlock.cli.watch import watch as keep_watch

    await keep_watch(ServerTickets(server), out, for_s=for_s)
    return 0


@approvals.command(short_help="Show tickets as they come; keys decide on them.")
@at_server(_watch_at_server)
@click.option("--for", "for_s", type=float, callback=_patience, metavar="S", help="Stop after so many seconds.")
@as_holder
@over_home
async def watch(app: Interlock, out: Output, /, for_s: float, token: str | None) -> int:
    """Show tickets as they come and what becomes of them, until interrupted. On a terminal, keys decide.

    With --json, one document on a line for each thing that happens.

    \b
    interlock approvals watch
    interlock approvals watch --for 60 --json
    interlock --server URL approvals watch
    """
    from interlock.cli.watch import LocalTickets
    from interlock.cli.watch import watch as keep_watch

    source = LocalTickets(app, await acting(app, token), everything=token is None)
    await keep_watch(source, out, for_s=for_s)
    return 0
