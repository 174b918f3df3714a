"""`interlock identities`: the registered people, agents and services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_server, over_home, reading
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.group()
def identities() -> None:
    """People, agents and services that may hold tokens. A token whose holder is not registered is refused.

    \b
    interlock identities add --name researcher --kind agent --trust 60
    interlock identities list
    """


async def _add_at_server(server: Server, out: Output, /, did: str | None, groups: tuple[str, ...], **facts: Any) -> int:
    return _answer_added(out, await server.post("/v1/identities", {"did": did, "groups": list(groups), **facts}))


@identities.command()
@at_server(_add_at_server)
@click.argument("did", metavar="[DID]", required=False)
@click.option("--name", default="", help="Its name.")
@click.option("--kind", type=click.Choice(["agent", "human", "service"]), default="agent", show_default=True)
@click.option("--trust", type=click.IntRange(0, 100), default=0, show_default=True, help="Policies read it.")
@click.option("--group", "groups", multiple=True, metavar="G", help="A group that it belongs to; repeat.")
@click.option("--tenant", default="local", show_default=True, help="The tenant it belongs to.")
@over_home
async def add(app: Interlock, out: Output, /, **given: Any) -> int:
    """Register an identity. Without a DID a did:key is made; its private key stays in the data directory.

    \b
    interlock identities add did:web:example.com:agents:a1 --name a1 --trust 40
    interlock identities add --name researcher --group readers
    """
    from interlock.api.identities import Identities

    return _answer_added(out, await Identities(app).add(by=app.caller, **given))


def _answer_added(out: Output, document: Json) -> int:
    for warning in document["warnings"]:
        out.page(error=True).line(f"warning: {warning}")
    out.answer(document, lambda page: page.line(document["did"]))
    return 0


async def _list_at_server(server: Server, out: Output, /) -> int:
    return _answer_list(out, (await server.get("/v1/identities"))["identities"])


@identities.command("list")
@at_server(_list_at_server)
@reading
def list_identities(reader: Reader, out: Output, /) -> int:
    """All identities, revoked ones included."""
    from interlock.api.at_rest import identities as registered

    return _answer_list(out, registered(reader))


def _answer_list(out: Output, documents: list[Json]) -> int:
    def show(page: Page) -> None:
        rows = [
            (
                one["name"] if one["tenant"] == "local" else f"{one['name']} of {one['tenant']}",
                *(one["kind"], str(one["trust"]), ", ".join(one["groups"]), one["state"], one["did"]),
            )
            for one in documents
        ]
        if rows:
            page.table(rows, ("name", "kind", "trust", "groups", "state", "did"))
        else:
            page.line("no identities yet; interlock identities add --name NAME, or issue a token to a new name")

    out.answer({"identities": documents}, show)
    return 0


async def _revoke_at_server(server: Server, out: Output, /, who: str, reason: str) -> int:
    return _answer_revoked(out, await server.post("/v1/identities/revoke", {"who": who, "reason": reason}))


@identities.command(short_help="Revoke an identity, with every token of it.")
@at_server(_revoke_at_server)
@click.argument("who", metavar="DID|NAME")
@click.option("--reason", required=True, help="Why, for the record.")
@over_home
async def revoke(app: Interlock, out: Output, /, who: str, reason: str) -> int:
    """Revoke an identity, with every token that it holds or delegated.

    \b
    interlock identities revoke researcher --reason 'its machine was lost'
    """
    from interlock.api.identities import Identities

    return _answer_revoked(out, await Identities(app).revoke(who, by=app.caller, reason=reason))


def _answer_revoked(out: Output, document: Json) -> int:
    out.done(document, f"{document['name'] or document['did']} is revoked, and every token that depends on it")
    return 0
