"""`interlock identities`: the registered people, agents and services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, over_home, reading, require

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.authority.identities import Identity
    from interlock.call.context import CallerKind
    from interlock.cli.render import Page
    from interlock.store.port import Reader


@click.group()
def identities() -> None:
    """People, agents and services that may hold tokens. A token whose holder is not registered is refused.

    \b
    interlock identities add --name researcher --kind agent --trust 60
    interlock identities list
    """


@identities.command()
@click.argument("did", metavar="[DID]", required=False)
@click.option("--name", default="", help="Its name.")
@click.option("--kind", type=click.Choice(["agent", "human", "service"]), default="agent", show_default=True)
@click.option("--trust", type=click.IntRange(0, 100), default=0, show_default=True, help="Policies read it.")
@click.option("--group", "groups", multiple=True, metavar="G", help="A group that it belongs to; repeat.")
@click.option("--tenant", default="local", show_default=True, help="The tenant it belongs to.")
@over_home
async def add(
    app: Interlock,
    out: Output,
    /,
    did: str | None,
    name: str,
    kind: CallerKind,
    trust: int,
    groups: tuple[str, ...],
    tenant: str,
) -> int:
    """Register an identity. Without a DID a did:key is made; its private key stays in the data directory.

    \b
    interlock identities add did:web:example.com:agents:a1 --name a1 --trust 40
    interlock identities add --name researcher --group readers
    """
    from interlock.authority.identities import Identity

    require(app.caller, "tokens:issue", "registering an identity")
    known = await app.identities.all() if name else []
    named = [one for one in known if (one.name, one.tenant) == (name, tenant) and one.did != did]
    if active := [one.did for one in named if one.state == "active"]:
        out.page(error=True).line(f"warning: {shared_name(name, active)}")
    elif named:
        out.page(error=True).line(f"warning: {revoked_before(name)}")
    facts: dict[str, Any] = {"name": name, "kind": kind, "trust": trust, "groups": frozenset(groups), "tenant": tenant}
    if did is None:
        identity = await _make_identity(app, **facts)
    else:
        identity = await app.identities.register(Identity(did=did, **facts), by=app.caller.acting)

    def show(page: Page) -> None:
        page.line(identity.did)

    out.answer(_document(identity), show)
    return 0


def revoked_before(name: str) -> str:
    """The warning about a new identity under the name of a revoked one."""
    return (
        f"an identity named {name} was revoked; this is a new one with a DID of its own, and the tokens of the old one"
        " stay refused: see interlock identities list"
    )


def shared_name(name: str, dids: list[str]) -> str:
    """The warning about a new identity under the name of others that are in use."""
    others = " and ".join(dids)
    return f"{name} is already the name of {others}; commands that take a name refuse this one: write the DID there"


async def _make_identity(app: Interlock, **facts: Any) -> Identity:
    from interlock.api.tokens import make_identity

    return await make_identity(app, by=app.caller, **facts)


async def named_here(app: Interlock, name: str, kind: CallerKind) -> Identity:
    """The identity of a name in `local`, whether or not other tenants have it too; a new name gets a new did:key."""
    return await app.identities.find(name) or await _make_identity(app, name=name, kind=kind)


@identities.command("list")
@reading
def list_identities(reader: Reader, out: Output, /) -> int:
    """All identities, revoked ones included."""
    from interlock.authority.identities import identity_of
    from interlock.store.identities import all_identities

    documents = [_document(identity_of(row)) for row in all_identities(reader)]

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


@identities.command(short_help="Revoke an identity, with every token of it.")
@click.argument("who", metavar="DID|NAME")
@click.option("--reason", required=True, help="Why, for the record.")
@over_home
async def revoke(app: Interlock, out: Output, /, who: str, reason: str) -> int:
    """Revoke an identity, with every token that it holds or delegated.

    \b
    interlock identities revoke researcher --reason 'its machine was lost'
    """
    require(app.caller, "tokens:issue", "revoking an identity")
    known = await _one(app, who)
    did = who if known is None else known.did
    await app.identities.revoke(did, reason=reason, by=app.caller.acting)

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        name = did if known is None else known.name or did
        page.line(GOOD, f" {name} is revoked, and every token that depends on it")

    out.answer({"did": did, "state": "revoked"}, show)
    return 0


async def _one(app: Interlock, who: str) -> Identity | None:
    """The identity of a name or DID. E3004, with what to type, where several have the name."""
    from interlock.core.errors import Failure

    try:
        return await app.identities.find(who)
    except Failure as failure:
        known = await app.identities.all()
        active = [one.did for one in known if (one.name, one.tenant, one.state) == (who, "local", "active")]
        if failure.code != "E3004" or len(active) < 2:
            raise
        advice = f"name the one that you mean: interlock identities revoke {active[0]} --reason WHY"
        words = f"{len(active)} identities are named `{who}`: {', '.join(active)}"
        raise Failure("E3004", words, details={"dids": active}, resolution=advice) from None


def _document(identity: Identity) -> dict[str, Any]:
    return {
        "did": identity.did,
        "name": identity.name,
        "kind": identity.kind,
        "tenant": identity.tenant,
        "trust": identity.trust,
        "groups": sorted(identity.groups),
        "state": identity.state,
    }
