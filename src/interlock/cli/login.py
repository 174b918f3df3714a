"""`interlock login` and `interlock logout`: the server and the token that later commands use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import anywhere, held_token, without_home
from interlock.cli.logins import Login, login_file, remove_login, store_login, stored_login
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.cli.render import Page

Json = dict[str, Any]
_LONGEST_TOKEN = 65_536


@click.command(short_help="Use a server, with a token, for every later command.")
@click.argument("url", required=False)
@anywhere
@without_home
def login(out: Output, /, url: str | None) -> int:
    """Use the server at URL, with a token, for every later command; without URL, show which one is used.

    The token is taken from --token-file, INTERLOCK_TOKEN or standard input, and tried at once. Both are kept in a file
    that only you can read. --server and --home, and their variables, take precedence over a login.

    \b
    interlock login https://tools.example.com
    interlock --token-file token login https://tools.example.com
    interlock login
    """
    import asyncio

    from interlock.cli.remote import Server
    from interlock.core.errors import Failure

    known = stored_login() if url is None else None
    if url is None and known is None:
        raise Failure("E3212", "you are not logged in to a server", resolution="log in: interlock login URL")
    new = known or Login(str(url).rstrip("/"), held_token() or _asked_token(), out.session.insecure)
    server = Server(new.server, new.token, insecure=new.insecure)
    picture = asyncio.run(server.post("/v1/tokens/inspect", {"token": new.token}))
    if known is None:
        store_login(new)
    chain: list[Json] = picture["chain"]
    document: Json = {
        "server": new.server,
        "holder": chain[-1]["subject"],
        "name": chain[-1]["name"],
        "scopes": chain[-1]["scopes"],
        "expires_at": min(one["expires"] for one in chain),
        "file": str(login_file()),
    }

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD, clock_time

        page.line(GOOD, f" logged in to {new.server} as {document['name'] or document['holder']}")
        scopes = ", ".join(document["scopes"]) or "none"
        page.facts([("scopes", scopes), ("until", clock_time(document["expires_at"])), ("kept in", document["file"])])

    out.answer(document, show)
    return 0


def _asked_token() -> str:
    """The token that the user types, unseen, or that comes through standard input."""
    if sys.stdin.isatty():
        text: str = click.prompt("token", hide_input=True, err=True)
    else:
        text = sys.stdin.read(_LONGEST_TOKEN)
    if not text.strip():
        raise click.UsageError("no token: give one with --token-file, INTERLOCK_TOKEN or standard input")
    return text.strip()


@click.command()
@anywhere
@without_home
def logout(out: Output, /) -> int:
    """Forget the server and the token of `interlock login`. The token itself stays valid until it expires.

    \b
    interlock logout
    """
    was = remove_login()
    words = "logged out; to end the token as well: interlock token revoke" if was else "you were not logged in"
    out.answer({"logged_out": was}, lambda page: page.line(words))
    return 0
