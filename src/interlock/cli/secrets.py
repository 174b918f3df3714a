"""`interlock secrets`: store credentials for tools, see which there are, change the key they are sealed with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from interlock.cli.command import at_rest, local_only, over_home
from interlock.cli.output import Output
from interlock.cli.values import parse_span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.api.interlock import Interlock
    from interlock.api.types import CredentialEntry, Reader, StoredCredential
    from interlock.cli.render import Page

_stays_here = local_only("handles stored credentials, which neither come from nor leave their machine by a server")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@click.group()
def secrets() -> None:
    """Credentials that tools use and nobody sees.

    \b
    interlock secrets set github/token
    interlock secrets list
    """


# set


def _value(_: click.Context, __: click.Parameter, given: str | None) -> str:
    """The value, from a prompt or from stdin; it is asked for before anything is opened."""
    if given == "-":
        try:
            return sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError:
            raise click.UsageError("what came on stdin is not text in UTF-8") from None
    if given is not None:
        raise click.UsageError(
            "a secret is not given as an argument, where others can read it; leave it out, or give -"
        )
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on; give - and send the value on stdin")
    value: str = click.prompt("Value (not shown)", hide_input=True, confirmation_prompt="Once more", err=True)
    return value


def _span(context: click.Context, parameter: click.Parameter, given: str | None) -> int | None:
    return None if given is None else parse_span(context, parameter, given)


@secrets.command(name="set")
@_stays_here
@click.argument("name")
@click.argument("value", metavar="[-]", required=False, callback=_value)
@click.option("--slot", default="main", show_default=True, help="Which of several credentials under this name.")
@click.option("--expires", "lifetime_ms", metavar="SPAN", callback=_span, help="How long it is valid: 30d, 12h.")
@over_home
async def set_(app: Interlock, out: Output, /, name: str, value: str, slot: str, lifetime_ms: int | None) -> int:
    """Store a credential. Its value is asked for without being shown, or read from stdin with -.

    \b
    interlock secrets set github/token
    pass show github | interlock secrets set github/token - --expires 30d
    """
    from interlock.api.credentials import CredentialOperations
    from interlock.core.clock import iso

    expires_ms = await CredentialOperations(app).store(name, value, by=app.caller, slot=slot, lifetime_ms=lifetime_ms)

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {name} [{slot}] is stored", right=f"a tool asks for it by credentials:{name}")

    expires_at = None if expires_ms is None else iso(expires_ms)
    out.answer({"name": name, "slot": slot, "expires_at": expires_at}, show)
    return 0


# list


def _list_at_rest(reader: Reader, out: Output, /) -> int | None:
    from interlock.api.at_rest import credentials
    from interlock.api.homes import home_at

    found = credentials(reader, out.session.path)
    return None if found is None else _answer_list(out, found, home_at(out.session.path).now_ms(reader))


@secrets.command(name="list", short_help="Which credentials there are, never their values.")
@_stays_here
@at_rest(_list_at_rest)
@over_home
async def list_(app: Interlock, out: Output, /) -> int:
    """Which credentials there are: name, slot, age and expiry, never a value."""
    from interlock.api.credentials import CredentialOperations

    return _answer_list(out, await CredentialOperations(app).list(by=app.caller), app.clock.now_ms())


def _answer_list(out: Output, stored: Sequence[StoredCredential | CredentialEntry], now_ms: int) -> int:
    def show(page: Page) -> None:
        if not stored:
            page.line("no credentials yet; store one with interlock secrets set NAME")
            return
        rows = [(one.name, one.slot, _words(now_ms - one.created_ms), _outlook(one, now_ms)) for one in stored]
        page.table(rows, head=("name", "slot", "age", "expires"))

    out.answer({"secrets": [_document(one, now_ms) for one in stored]}, show)
    return 0


def _document(one: StoredCredential | CredentialEntry, now_ms: int) -> dict[str, str | None]:
    from interlock.core.clock import iso

    return {
        "name": one.name,
        "slot": one.slot,
        "created_at": iso(one.created_ms),
        "expires_at": None if one.expires_ms is None else iso(one.expires_ms),
        "resting_until": iso(one.resting_until_ms) if one.resting_until_ms > now_ms else None,
    }


def _outlook(one: StoredCredential | CredentialEntry, now_ms: int) -> str:
    if one.expires_ms is not None and one.expires_ms <= now_ms:
        return "has expired"
    words = "never" if one.expires_ms is None else f"in {_words(one.expires_ms - now_ms)}"
    rests_ms = one.resting_until_ms - now_ms
    return words if rests_ms <= 0 else f"{words}; rests for {_words(rests_ms)}"


def _words(ms: int) -> str:
    """A span, to the nearest of its largest unit."""
    seconds = max(ms, 0) // 1000
    unit = next((unit for unit in "dhm" if seconds >= _UNITS_S[unit]), "s")
    return f"{round(seconds / _UNITS_S[unit])} {unit}"


# remove


@secrets.command()
@_stays_here
@click.argument("name")
@click.option("--slot", help="Only this one of several.")
@over_home
async def remove(app: Interlock, out: Output, /, name: str, slot: str | None) -> int:
    """Forget a credential. Calls that hold it now keep it until they end."""
    from interlock.api.credentials import CredentialOperations

    count = await CredentialOperations(app).remove(name, by=app.caller, slot=slot)

    out.done({"name": name, "removed": count}, f"{name} is forgotten", right=f"{count} slot{'' if count == 1 else 's'}")
    return 0


# rotate-key


@secrets.command(name="rotate-key")
@_stays_here
@over_home
async def rotate_key(app: Interlock, out: Output, /) -> int:
    """Seal every credential under a new key and drop the old one. Exits 1 if one could not be opened and was left.

    Interrupted, it loses nothing; run it again to finish.
    """
    from interlock.api.credentials import CredentialOperations

    with out.working("sealing every credential under a new key …"):
        sealed, left = await CredentialOperations(app).rotate_key(by=app.caller)

    def show(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD

        page.line(GOOD, f" {sealed} credential{'' if sealed == 1 else 's'} sealed under a new key")
        for one in left:
            page.line(BAD, f" {one.name} [{one.slot}] cannot be opened; set it again or remove it")

    out.answer({"sealed": sealed, "left": [{"name": one.name, "slot": one.slot} for one in left]}, show)
    return 1 if left else 0
