"""`interlock keys`: the keys that sign tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_rest, at_server, looking, over_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Algorithm, Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]
_algorithm = click.Choice(["RS256", "EdDSA", "ES256"])


@click.group()
def keys() -> None:
    """The keys that sign this issuer's tokens. The newest signs; older ones verify until they are retired.

    With --server, those of the server. Private keys are made there and stay there.

    \b
    interlock keys rotate
    interlock keys list
    interlock keys jwks > jwks.json
    """


async def _init_at_server(server: Server, out: Output, /, algorithm: Algorithm) -> int:
    return _answer_made(out, await server.post("/v1/keys", {"algorithm": algorithm, "first": True}))


@keys.command()
@at_server(_init_at_server)
@click.option("--alg", "algorithm", type=_algorithm, default="RS256", show_default=True, help="What it signs with.")
@over_home
async def init(app: Interlock, out: Output, /, algorithm: Algorithm) -> int:
    """Make the first key. Issuing a first token does the same with RS256.

    \b
    interlock keys init --alg EdDSA
    """
    from interlock.api.signing_keys import SigningKeys

    return _answer_made(out, await SigningKeys(app).make(by=app.caller, algorithm=algorithm, first=True))


async def _rotate_at_server(server: Server, out: Output, /, algorithm: Algorithm | None) -> int:
    return _answer_made(out, await server.post("/v1/keys", {"algorithm": algorithm}))


@keys.command()
@at_server(_rotate_at_server)
@click.option("--alg", "algorithm", type=_algorithm, help="What it signs with [default: as the key before it].")
@over_home
async def rotate(app: Interlock, out: Output, /, algorithm: Algorithm | None) -> int:
    """Make a new key that signs from now on. Tokens that are out stay good until their key is retired.

    \b
    interlock keys rotate
    """
    from interlock.api.signing_keys import SigningKeys

    return _answer_made(out, await SigningKeys(app).make(by=app.caller, algorithm=algorithm))


def _answer_made(out: Output, key: Json) -> int:
    out.done(key, f"{key['kid']} signs from now on", right=key["algorithm"])
    return 0


def _list_at_rest(_: Reader, out: Output, /) -> int | None:
    from interlock.api.at_rest import signing_keys

    held = signing_keys(out.session.path)
    return None if held is None else _answer_list(out, held)


async def _list_at_server(server: Server, out: Output, /) -> int:
    return _answer_list(out, (await server.get("/v1/keys"))["keys"])


@keys.command("list")
@at_server(_list_at_server)
@at_rest(_list_at_rest)
@looking
async def list_keys(app: Interlock, out: Output, /) -> int:
    """Every key that verifies, oldest first, and which one signs."""
    from interlock.api.signing_keys import every_key

    return _answer_list(out, await every_key(app))


def _answer_list(out: Output, documents: list[Json]) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import clock_time

        rows = [
            (one["kid"], one["algorithm"], clock_time(one["made"]), "signs" if one["signs"] else "verifies")
            for one in documents
        ]
        if rows:
            page.table(rows, ("signing key", "algorithm", "made", "use"))
        else:
            page.line("no keys yet; interlock keys init makes one, and so does the first token")

    out.answer({"keys": documents}, show)
    return 0


async def _retire_at_server(server: Server, out: Output, /, kid: str, reason: str) -> int:
    return _answer_retired(out, await server.post("/v1/keys/retire", {"kid": kid, "reason": reason}))


@keys.command()
@at_server(_retire_at_server)
@click.argument("kid", metavar="KID")
@click.option("--reason", default="retired", show_default=True, help="Why, for the record.")
@over_home
async def retire(app: Interlock, out: Output, /, kid: str, reason: str) -> int:
    """Remove a key that signs no longer. Every token it signed is void from now on, in every process.

    A key that leaked and still signs: interlock token revoke KID, which puts a new one in its place.

    \b
    interlock keys retire 4bPC…
    """
    from interlock.api.signing_keys import SigningKeys

    return _answer_retired(out, await SigningKeys(app).retire(kid, by=app.caller, reason=reason))


def _answer_retired(out: Output, document: Json) -> int:
    out.done(document, f"{document['kid']} is retired; what it signed is void")
    return 0


async def _jwks_at_server(server: Server, out: Output, /) -> int:
    out.write(await server.get("/v1/keys/jwks"))
    return 0


@keys.command(short_help="The public halves, for services that verify our tokens.")
@at_server(_jwks_at_server)
@looking
async def jwks(app: Interlock, out: Output, /) -> int:
    """The public halves as a JWKS document, for services that verify our tokens."""
    from interlock.api.signing_keys import SigningKeys

    out.write(SigningKeys(app).jwks())
    return 0
