"""`interlock upstream`: connect to MCP servers and other services, and govern their tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_rest, at_server, looking, over_home
from interlock.cli.completion import upstream_names
from interlock.cli.output import Output
from interlock.cli.upstream_add import LOOK_S, add, answer_report, counts, read_overlay, trying_out
from interlock.cli.upstream_import import import_

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(short_help="Tools that other systems serve, all governed.")
def upstream() -> None:
    """MCP servers, OpenAPI, HTTP, gRPC and WebSocket services, LangChain tools and function schemas, all governed.

    The statements of an upstream about its tools are not trusted: the tools count as irreversible, and a person is
    asked for every call, until you accept its hints or describe the tools in an overlay file.

    \b
    interlock upstream add mcp files -- npx -y @modelcontextprotocol/server-filesystem /srv/data
    interlock upstream add openapi petstore openapi.yaml --accept-hints
    interlock upstream import ~/.cursor/mcp.json
    interlock upstream list
    """


upstream.add_command(add)
upstream.add_command(import_)


# List, show, refresh, accept, probe and remove


async def _list_at_server(server: Server, out: Output, /) -> int:
    return _answer_list(out, await server.get("/v1/upstreams"))


def _list_at_rest(reader: Reader, out: Output, /) -> int | None:
    from interlock.api.at_rest import upstreams

    document = upstreams(reader)
    return None if document is None else _answer_list(out, document)


@upstream.command("list", short_help="Every upstream, with its state and its tools.")
@at_server(_list_at_server)
@at_rest(_list_at_rest)
@looking
async def list_upstreams(app: Interlock, out: Output, /) -> int:
    """Every upstream with its state and its tools; then the breakers of other services that tools name."""
    from interlock.api import upstreams

    return _answer_list(out, await upstreams.list_upstreams(app))


def _answer_list(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        rows = [
            (one["name"], one["kind"], one["state"], counts([tool["state"] for tool in one["tools"]]), one["reason"])
            for one in document["upstreams"]
        ]
        if rows:
            page.table(rows, ("name", "kind", "state", "tools", ""))
        else:
            page.line("no upstreams yet; interlock upstream add --help")
        for one in document["services"]:
            page.line(_breaker(one))

    out.answer(document, show)
    return 0


def _breaker(health: Json) -> str:
    from interlock.core.formatting import wait

    left_ms = max(health["retryAfterMs"], health["suspendedMs"])
    return f"breaker of {health['service']}: {health['state']}" + (f"; no call for {wait(left_ms)}" if left_ms else "")


async def _show_at_server(server: Server, out: Output, /, name: str) -> int:
    from interlock.cli.remote import part

    return _answer_show(out, await server.get(f"/v1/upstreams/{part(name)}"))


def _show_at_rest(reader: Reader, out: Output, /, name: str) -> int | None:
    from interlock.api.at_rest import upstream

    document = upstream(reader, name)
    return None if document is None else _answer_show(out, document)


@upstream.command(short_help="One upstream, its breakers, tools and changes.")
@at_server(_show_at_server)
@at_rest(_show_at_rest)
@click.argument("name", shell_complete=upstream_names)
@looking
async def show(app: Interlock, out: Output, /, name: str) -> int:
    """One upstream, its breakers and its tools; for a changed tool, the difference to when it was admitted.

    For a service that tools name and that is no upstream (external_service): its breakers.
    """
    from interlock.api.upstreams import show_upstream

    return _answer_show(out, await show_upstream(app, name))


def _answer_show(out: Output, document: Json) -> int:
    if document["kind"] == "external_service":
        return _show_service(out, document)
    tools: list[Json] = document["tools"]

    def write(page: Page) -> None:
        page.facts([("kind", document["kind"]), ("state", f"{document['state']} {document['reason']}".strip())])
        for one in document["services"]:
            page.line(_breaker(one))
        page.table([(one["name"], one["state"], one["tool_id"], one["version"] or "", one["reason"]) for one in tools])
        for one in tools:
            if "changes" not in one:
                continue
            page.line("")
            parts: dict[str, list[Any]] = one["changes"]
            if not parts:
                page.line(f"{one['name']} is offered as it was admitted; it stays out until you accept it")
                continue
            page.line(f"{one['name']}, as admitted and as offered now:")
            page.table([(part, _words(was), "→", _words(now)) for part, (was, now) in parts.items()], indent="  ")

    out.answer(document, write)
    return 0


def _show_service(out: Output, document: Json) -> int:
    def write(page: Page) -> None:
        page.line(f"{document['name']} is no upstream, but a service that tools name (external_service)")
        for one in document["services"]:
            page.line(_breaker(one))

    out.answer(document, write)
    return 0


def _words(value: Any) -> str:
    import orjson

    return value if isinstance(value, str) else orjson.dumps(value).decode()


async def _refresh_at_server(
    server: Server, out: Output, /, name: str, overlay: Path | None, accept_hints: bool
) -> int:
    from interlock.cli.remote import part

    fields: Json = {} if overlay is None else {"overlay": read_overlay(overlay)}
    fields |= {"accept_hints": True} if accept_hints else {}
    with out.working(f"the server asks {name} for its tools …"):
        report = await server.post(f"/v1/upstreams/{part(name)}/refresh", fields, timeout_s=LOOK_S)
    return answer_report(out, report)


@upstream.command()
@at_server(_refresh_at_server)
@click.argument("name", shell_complete=upstream_names)
@click.option("--overlay", type=_FILE, help="Replace the overlay: your statements about its tools.")
@click.option(
    "--accept-hints", is_flag=True, help="Trust what it says about the tools that it offers now: readOnlyHint."
)
@over_home
async def refresh(app: Interlock, out: Output, /, name: str, overlay: Path | None, accept_hints: bool) -> int:
    """Discover its tools again. Changed ones are kept out until you accept them."""
    from interlock.api.upstreams import Upstreams

    given = None if overlay is None else read_overlay(overlay)
    with trying_out(app, out, f"asking {name} for its tools, and trying out what is new …"):
        report = await Upstreams(app).refresh(name, by=app.caller, overlay=given, accept_hints=accept_hints)
    return answer_report(out, report)


async def _accept_at_server(
    server: Server, out: Output, /, name: str, tools: tuple[str, ...], reason: str, shown: tuple[str, ...]
) -> int:
    from interlock.cli.remote import part

    fields = {"tools": list(tools), "reason": reason, "shown": _digests(shown)}
    with out.working(f"the server tries out the tools of {name} …"):
        report = await server.post(f"/v1/upstreams/{part(name)}/accept", fields, timeout_s=LOOK_S)
    return answer_report(out, report)


@upstream.command(short_help="Accept changed definitions as new versions.")
@at_server(_accept_at_server)
@click.argument("name", shell_complete=upstream_names)
@click.argument("tools", nargs=-1)
@click.option("--reason", required=True, help="Why; it goes on record.")
@click.option(
    "--shown",
    multiple=True,
    metavar="TOOL=DIGEST",
    help="Only if it still has the digest that `show --json` gave as `seen`; repeat.",
)
@over_home
async def accept(
    app: Interlock, out: Output, /, name: str, tools: tuple[str, ...], reason: str, shown: tuple[str, ...]
) -> int:
    """Accept changed definitions as new versions; all of them unless you name some."""
    from interlock.api.upstreams import Upstreams

    upstreams = Upstreams(app)
    with trying_out(app, out, f"trying out the tools of {name} …"):
        report = await upstreams.accept(name, by=app.caller, tools=tools, reason=reason, shown=_digests(shown))
    return answer_report(out, report)


def _digests(shown: tuple[str, ...]) -> dict[str, str]:
    return {tool: digest for tool, _, digest in (one.rpartition("=") for one in shown)}


async def _probe_at_server(server: Server, out: Output, /, name: str) -> int:
    from interlock.cli.remote import part

    with out.working(f"the server asks {name} whether it answers …"):
        report = await server.post(f"/v1/upstreams/{part(name)}/probe", {}, timeout_s=120.0)
    return _answer_probe(out, report)


@upstream.command()
@at_server(_probe_at_server)
@click.argument("name", shell_complete=upstream_names)
@over_home
async def probe(app: Interlock, out: Output, /, name: str) -> int:
    """Check now whether it answers."""
    from interlock.api.upstreams import Upstreams

    with out.working(f"asking {name} whether it answers …"):
        report = await Upstreams(app).probe(name, by=app.caller)
    return _answer_probe(out, report)


def _answer_probe(out: Output, document: Json) -> int:
    out.answer(document, lambda page: page.line(f"{document['state']} {document['reason']}".strip()))
    return 0 if document["state"] == "available" else 1


async def _remove_at_server(server: Server, out: Output, /, name: str) -> int:
    from interlock.cli.remote import part

    return _answer_removed(out, await server.ask("DELETE", f"/v1/upstreams/{part(name)}"))


@upstream.command()
@at_server(_remove_at_server)
@click.argument("name", shell_complete=upstream_names)
@over_home
async def remove(app: Interlock, out: Output, /, name: str) -> int:
    """Remove it. Its tools can no longer be called; their calls stay on record."""
    from interlock.api.upstreams import Upstreams

    return _answer_removed(out, await Upstreams(app).remove(name, by=app.caller))


def _answer_removed(out: Output, report: Json) -> int:
    name: str = report["removed"]
    out.answer({"name": name, "state": "removed"}, lambda page: page.line(f"{name} was removed"))
    return 0
