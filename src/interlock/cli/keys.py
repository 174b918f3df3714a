"""`interlock keys`: the keys that sign tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, at_rest, looking, over_home, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.api.interlock import Interlock
    from interlock.authority.keys import Algorithm, SigningKey
    from interlock.cli.render import Page
    from interlock.store.port import Reader

_algorithm = click.Choice(["RS256", "EdDSA", "ES256"])


@click.group()
def keys() -> None:
    """The keys that sign this issuer's tokens. The newest signs; older ones verify until they are retired.

    \b
    interlock keys rotate
    interlock keys list
    interlock keys jwks > jwks.json
    """


@keys.command()
@click.option("--alg", "algorithm", type=_algorithm, default="RS256", show_default=True, help="What it signs with.")
@over_home
async def init(app: Interlock, out: Output, /, algorithm: Algorithm) -> int:
    """Make the first key. Issuing a first token does the same with RS256.

    \b
    interlock keys init --alg EdDSA
    """
    require(app.caller, "tokens:issue", "making a key")
    return _made(out, await app.tokens.rotate_key(algorithm, by=app.caller, first=True))


@keys.command()
@click.option("--alg", "algorithm", type=_algorithm, help="What it signs with [default: as the key before it].")
@over_home
async def rotate(app: Interlock, out: Output, /, algorithm: Algorithm | None) -> int:
    """Make a new key that signs from now on. Tokens that are out stay good until their key is retired.

    \b
    interlock keys rotate
    """
    require(app.caller, "tokens:issue", "making a key")
    return _made(out, await app.tokens.rotate_key(algorithm, by=app.caller))


def _made(out: Output, key: SigningKey) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {key.kid} signs from now on", right=key.algorithm)

    out.answer(_document(key, signs=True), show)
    return 0


def _list_at_rest(_: Reader, out: Output, /) -> int | None:
    from interlock.authority.keys import IssuerKeys
    from interlock.core.clock import Clock
    from interlock.store.home import Home

    held = IssuerKeys(Home(out.session.path).keys / "issuer", clock=Clock()).all()
    # Whether a data directory without keys has lost them, an open one tells.
    return _answer_list(out, held) if held else None


@keys.command("list")
@at_rest(_list_at_rest)
@looking
async def list_keys(app: Interlock, out: Output, /) -> int:
    """Every key that verifies, oldest first, and which one signs."""
    held = app.issuer_keys.all()
    if not held:
        await app.tokens.check_signer()
    return _answer_list(out, held)


def _answer_list(out: Output, held: Sequence[SigningKey]) -> int:
    documents = [_document(key, signs=key is held[-1]) for key in held]

    def show(page: Page) -> None:
        from interlock.cli.render import clock_time

        rows = [
            (one["kid"], one["algorithm"], clock_time(one["made"]), "signs" if one["signs"] else "verifies")
            for one in documents
        ]
        if rows:
            page.table(rows, ("key", "algorithm", "made", "use"))
        else:
            page.line("no keys yet; interlock keys init makes one, and so does the first token")

    out.answer({"keys": documents}, show)
    return 0


def _document(key: SigningKey, *, signs: bool) -> dict[str, Any]:
    from interlock.core.clock import iso

    return {"kid": key.kid, "algorithm": key.algorithm, "made": iso(key.created_ms), "signs": signs}


@keys.command()
@click.argument("kid", metavar="KID")
@click.option("--reason", default="retired", show_default=True, help="Why, for the record.")
@over_home
async def retire(app: Interlock, out: Output, /, kid: str, reason: str) -> int:
    """Remove a key that signs no longer. Every token it signed is void from now on, in every process.

    A key that leaked and still signs: interlock token revoke KID, which puts a new one in its place.

    \b
    interlock keys retire 4bPC…
    """
    require(app.caller, "tokens:issue", "retiring a key")
    await app.tokens.retire_key(kid, reason=reason, by=app.caller)

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {kid} is retired; what it signed is void")

    out.answer({"kid": kid, "retired": True}, show)
    return 0


@keys.command(short_help="The public halves, for services that verify our tokens.")
@looking
async def jwks(app: Interlock, out: Output, /) -> int:
    """The public halves as a JWKS document, for services that verify our tokens."""
    out.write(app.issuer_keys.jwks())
    return 0
