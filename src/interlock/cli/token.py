"""`interlock token`: issue, delegate, inspect and revoke capability tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from interlock.cli.command import at_server, looking, over_home
from interlock.cli.output import Output
from interlock.cli.values import parse_span

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page

Json = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


@click.group(short_help="Capability tokens: issue, delegate, inspect, revoke.")
def token() -> None:
    """Capability tokens: the tools, scopes and resources that an agent may use, until when, and on whose behalf.

    \b
    TOKEN=$(interlock token issue --agent researcher --tool 'demo.*@^1.0.0' --ttl 1h)
    interlock token inspect "$TOKEN"
    interlock token revoke "$TOKEN" --reason 'done'
    """


# Options that narrow a token


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    return parse_span(context, parameter, value if value[-1:].isalpha() else f"{value}s") // 1000


def _grants(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    from interlock.api.tokens import tool_grants
    from interlock.core.errors import Failure

    try:
        tool_grants(values)
    except Failure as failure:
        raise click.BadParameter(failure.message) from None
    return list(values) or None


_NARROWING = (
    click.option(
        "--tool",
        "tools",
        multiple=True,
        callback=_grants,
        metavar="TOOL[@RANGE]",
        help="A tool, ns.* or *; repeat.",
    ),
    click.option("--scope", "scopes", multiple=True, metavar="S", help="A scope it holds; repeat."),
    click.option("--resource", "resources", multiple=True, metavar="R", help="A resource, or a prefix ending in *."),
    click.option("--max-uses", type=click.IntRange(1), metavar="N", help="The number of calls that it allows."),
    click.option("--max-cost", type=click.FloatRange(0), metavar="X", help="The highest cost of one call."),
    click.option(
        "--max-class",
        "mutation_class",
        type=click.Choice(["read_only", "write_reversible", "write_irreversible"]),
        help="The strongest kind of tool it may call.",
    ),
    click.option("--environment", "environments", multiple=True, metavar="E", help="Where it is valid; repeat."),
    click.option(
        "--surface",
        metavar="FOR",
        help="What its surface is for: task:ID, turn:ID, skill:ID, peer_agent[:ID], tenant.",
    ),
)


def _narrowing(command: F) -> F:
    for option in reversed(_NARROWING):
        command = option(command)
    return command


def _narrowed(given: Json) -> Json:
    """The options that narrow a token, as api and the REST endpoint take them."""
    names = ("max_uses", "max_cost", "mutation_class", "surface")
    limits = {name: given[name] for name in names if given[name] is not None}
    if given["environments"]:
        limits["environments"] = list(given["environments"])
    return {"tools": given["tools"], "resources": list(given["resources"]) or None, "constraints": limits or None}


def _sent(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


# issue


async def _issue_at_server(
    server: Server, out: Output, /, agent: str | None, person: str | None, user: str | None, ttl_s: int, **given: Any
) -> int:
    _require_one_holder(agent, person)
    fields = {"agent": agent, "person": person, "for": user, "ttl_s": ttl_s, "scopes": list(given["scopes"])}
    return _answer_token(out, await server.post("/v1/tokens/issue", _sent({**fields, **_narrowed(given)})))


def _require_one_holder(agent: str | None, person: str | None) -> None:
    if (agent is None) == (person is None):
        raise click.UsageError("name the holder: --agent NAME or --person NAME")


@token.command()
@at_server(_issue_at_server)
@click.option("--agent", metavar="NAME|DID", help="The agent that holds it; a new name is registered.")
@click.option("--person", metavar="NAME|DID", help="The person that holds it, instead of an agent.")
@click.option("--for", "user", metavar="NAME|DID", help="The person on whose behalf the agent acts.")
@click.option(
    "--ttl", "ttl_s", default="1h", show_default=True, callback=_seconds, metavar="TIME", help="90s, 15m, 1h, 1d."
)
@_narrowing
@over_home
async def issue(
    app: Interlock, out: Output, /, agent: str | None, person: str | None, user: str | None, ttl_s: int, **given: Any
) -> int:
    """Issue a token and print it, and nothing else, on stdout. By default: every tool, no scopes, one hour.

    A token is an upper bound: the policy still decides every call.

    \b
    TOKEN=$(interlock token issue --agent researcher --for alice --tool 'demo.*@^1.0.0' --scope files:read)
    interlock token issue --person alice --max-class read_only --ttl 15m
    """
    from interlock.api.tokens import Tokens

    _require_one_holder(agent, person)
    wanted = {"agent": agent, "person": person, "user": user, "ttl_s": ttl_s, "scopes": given["scopes"]}
    return _answer_token(out, await Tokens(app).issue(by=app.caller, **wanted, **_narrowed(given)))


def _answer_token(out: Output, picture: Json) -> int:
    if not out.as_json:
        from interlock.api.identities import revoked_before

        click.echo(picture["token"])
        page = out.page(error=True)
        page.line(_summary(picture))
        for name in picture["registered"]:
            if name not in picture.get("reissued", ()):
                page.line(f"{name} was not known and is registered now; see interlock identities list")
        for name in picture.get("reissued", ()):
            page.line(f"warning: {revoked_before(name)}")
        return 0
    out.write(picture)
    return 0


def _summary(picture: Json) -> str:
    chain: list[Json] = picture["chain"]
    leaf = chain[-1]
    behalf = "" if len(chain) == 1 else f" for {_called(chain[0])}"
    scopes = ", ".join(leaf["scopes"]) or "no scopes"
    # The whole lifetime, not what is left of it: a slow machine would print another time than was asked for.
    lifetime = datetime.fromisoformat(leaf["expires"]) - datetime.fromisoformat(leaf["not_before"])
    return (
        f"{_called(leaf)}{behalf} · {', '.join(leaf['tools']) or 'no tools'} · {scopes}"
        f" · {_span(round(lifetime.total_seconds()))} · {leaf['jti']}"
    )


# delegate


async def _delegate_at_server(
    server: Server, out: Output, /, parent: str | None, to: str, ttl_s: int | None, key_file: Path | None, **given: Any
) -> int:
    if key_file is not None:
        raise click.UsageError("--key signs on this machine, without a server: leave out --server")
    held = _text(parent or "-", "give --token, set INTERLOCK_TOKEN, or send one on stdin")
    fields = {"token": held, "to": to, "ttl_s": ttl_s, "scopes": list(given["scopes"]) or None}
    return _answer_token(out, await server.post("/v1/tokens/delegate", _sent({**fields, **_narrowed(given)})))


@token.command()
@at_server(_delegate_at_server)
@click.option(
    "--token", "parent", envvar="INTERLOCK_TOKEN", help="The token to delegate [env: INTERLOCK_TOKEN; or stdin]."
)
@click.option("--to", "to", required=True, metavar="NAME|DID", help="The new holder; a new name is registered.")
@click.option(
    "--ttl", "ttl_s", callback=_seconds, metavar="TIME", help="90s, 15m, 1h, 1d [default: until the token expires]."
)
@click.option(
    "--key",
    "key_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Sign with the holder's own private key instead of a signing key of the data directory.",
)
@_narrowing
@over_home
async def delegate(
    app: Interlock, out: Output, /, parent: str | None, to: str, ttl_s: int | None, key_file: Path | None, **given: Any
) -> int:
    """Delegate a token, narrowed. What is not given stays as it is; nothing can be added.

    \b
    interlock token delegate --token "$TOKEN" --to summarizer --tool demo.balance --ttl 5m --max-uses 1
    """
    from interlock.api.tokens import Tokens

    held = _text(parent or "-", "give --token, set INTERLOCK_TOKEN, or send one on stdin")
    wanted = {"to": to, "ttl_s": ttl_s, "scopes": given["scopes"] or None, "key_file": key_file}
    return _answer_token(out, await Tokens(app).delegate(held, by=app.caller, **wanted, **_narrowed(given)))


def _text(given: str, how: str = "give a token, or send one on stdin") -> str:
    """A token from the command line, or from stdin for `-`."""
    if given != "-":
        return given.strip()
    text = "" if sys.stdin.isatty() else sys.stdin.read(65_536).strip()
    if not text:
        raise click.UsageError(f"there is no token: {how}")
    return text


# inspect


async def _inspect_at_server(server: Server, out: Output, /, text: str) -> int:
    return _answer_picture(out, await server.post("/v1/tokens/inspect", {"token": _text(text)}))


@token.command(short_help="Whether a token is valid, and what each link grants.")
@at_server(_inspect_at_server)
@click.argument("text", metavar="[TOKEN | -]", default="-")
@looking
async def inspect(app: Interlock, out: Output, /, text: str) -> int:
    """Whether a token is valid, and why not; the holder and the grants of each link. Exits 1 if it is not valid.

    \b
    interlock token inspect "$TOKEN"
    echo "$TOKEN" | interlock token inspect
    """
    from interlock.api.tokens import Tokens

    return _answer_picture(out, await Tokens(app).inspect(_text(text), by=app.caller))


def _answer_picture(out: Output, picture: Json) -> int:
    out.answer(picture, lambda page: _show(page, picture))
    return 0 if picture["valid"] else 1


def _show(page: Page, picture: Json) -> None:
    from interlock.cli.render import BAD, GOOD, Text

    if picture["valid"]:
        signed = f"signed by {picture['issuer']} with {picture['algorithm']}"
        page.line(GOOD, " ", Text("valid", "bold green"), f" · {_span(picture['seconds_left'])} left · {signed}")
    else:
        page.line(BAD, " ", Text(picture["code"], "bold red"), f"  {picture['why']}")
    for depth, link in enumerate(picture["chain"]):
        lead = "   " * depth + ("└─ " if depth else "")
        state = Text("  revoked", "red") if link["revoked"] else Text("")
        kind = link["kind"] or ("not looked up" if link["revoked"] is None else "not registered")
        page.line("  ", lead, Text(_called(link), "bold"), f"  {kind}", state)
        page.facts(_facts(link), indent="  " + "   " * (depth + 1))


def _facts(link: Json) -> list[tuple[str, Cell]]:
    from interlock.cli.render import clock_time

    facts: list[tuple[str, Cell]] = [
        ("tools", ", ".join(link["tools"]) or "none"),
        ("scopes", ", ".join(link["scopes"]) or "none"),
    ]
    if link["resources"] is not None:
        facts.append(("only on", ", ".join(link["resources"]) or "nothing"))
    facts += [(name.replace("_", " "), _value(value)) for name, value in link["constraints"].items()]
    facts += [("until", clock_time(link["expires"])), ("link", link["jti"]), ("holder", link["subject"])]
    return facts


def _value(value: Any) -> str:
    return ", ".join(cast("list[str]", value)) if isinstance(value, list) else str(value)


def _called(link: Json) -> str:
    name = link["name"] or f"{link['subject'][:24]}…"
    return name if link["tenant"] in (None, "local") else f"{name} of {link['tenant']}"


def _span(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 0.999 * size:  # some milliseconds of the lifetime have passed already
            return f"{max(seconds / size, 1):.3g} {unit}"
    return f"{seconds} s"


# revoke


async def _revoke_at_server(server: Server, out: Output, /, ref: str, reason: str, foreign: bool) -> int:
    fields = {"ref": _text(ref), "reason": reason, "foreign": foreign}
    return _answer_revoked(out, await server.post("/v1/tokens/revoke", fields))


@token.command(short_help="Revoke a token, a link, an identity or a signing key.")
@at_server(_revoke_at_server)
@click.argument("ref", metavar="JTI|TOKEN|NAME|DID|KID")
@click.option("--reason", required=True, help="Why, for the record.")
@click.option("--foreign", is_flag=True, help="Revoke an id that was never seen here.")
@over_home
async def revoke(app: Interlock, out: Output, /, ref: str, reason: str, foreign: bool) -> int:
    """Revoke a token, a link of a chain, an identity or a signing key, and what depends on it. Takes effect at once.

    \b
    interlock token revoke 01JCXK2M4Q8Z… --reason 'the task is done'
    interlock token revoke researcher --reason 'it left'
    interlock token revoke did:key:z6Mk… --reason 'its machine was lost'
    """
    from interlock.api.tokens import Tokens

    report = await Tokens(app).revoke(_text(ref), reason=reason, by=app.caller, foreign=foreign)
    return _answer_revoked(out, report)


def _answer_revoked(out: Output, report: Json) -> int:
    what = report["revoked"]

    out.done(report, f"revoked: {what}, and everything that depends on it")
    return 0
