"""`interlock serve`: opens the endpoints on one port, and prints what a newcomer needs for a first call."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock._version import __version__
from interlock.call.endpoints import DRAIN_S, ENDPOINTS, addresses, default_ports
from interlock.cli.command import TOKEN, refuse_token, without_home
from interlock.cli.environment import prepare_server
from interlock.cli.output import Output

if TYPE_CHECKING:
    import asyncio

    from interlock.api.interlock import Interlock
    from interlock.call.endpoints import Address
    from interlock.cli.render import Page
    from interlock.doors.listening import Listening
    from interlock.doors.server import Server

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PORT = click.IntRange(0, 65535)
_DRAINS = click.IntRange(0, 86_400)
_DELAY = "Behind a load balancer: after SIGTERM, go on serving for so long while /ready says no."
_DRAIN = "After SIGTERM, the time that calls in flight have to end before they are cut off."


def _ports(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for the HTTP port, and for the port of each endpoint that has its own."""
    own = {name: ENDPOINTS[name].label for name in default_ports()}
    for name, label in reversed(own.items()):
        command = click.option(f"--no-{name}", is_flag=True, help=f"Do not serve {label}.")(command)
        port = click.option(
            f"--{name}-port",
            type=_PORT,
            default=default_ports()[name],
            show_default=True,
            help=f"For {label}; 0 takes any.",
        )
        command = port(command)
    words = f"For all but {', '.join(own.values())}; 0 takes any."
    return click.option("--port", type=_PORT, default=8080, show_default=True, help=words)(command)


@click.command(short_help="Serve your tools over REST, MCP, JSON-RPC and gRPC.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@_ports
@click.option("--cert", type=_FILE, help="A certificate chain (PEM), for TLS.")
@click.option("--key", type=_FILE, help="Its private key (PEM).")
@click.option("--name", "names", multiple=True, metavar="HOST", help="A host name clients may call it by; repeat.")
@click.option("--origin", "origins", multiple=True, metavar="URL", help="A web origin that may call it; repeat.")
@click.option("--public-url", metavar="URL", help="Where clients find it, if a proxy stands in front.")
@click.option("--tools", "targets", multiple=True, metavar="FILE|MODULE", help="Tools to add before serving; repeat.")
@click.option("--bare", is_flag=True, help="On an empty data directory, do not add the demonstration tools.")
@click.option("--token/--no-token", "shows_token", default=None, help="Print a token [default: only to a terminal].")
@click.option("--shutdown-delay", type=click.FloatRange(0, 3600), default=0, metavar="SECONDS", help=_DELAY)
@click.option("--drain-timeout", type=_DRAINS, default=DRAIN_S, show_default=True, metavar="SECONDS", help=_DRAIN)
@click.option("--stdio", is_flag=True, help="Speak MCP on stdin and stdout instead, for clients that start servers.")
@without_home
def serve(out: Output, /, **given: Any) -> int:
    """Serve your tools over REST, MCP, JSON-RPC and gRPC, governed.

    Prints where everything is, a first call to paste, and what an MCP client wants to know; on a terminal also a token,
    which does not belong into a log. A data directory without tools gets the demo tools. Listens on loopback unless
    told otherwise; on a network, say by which names clients call it, and give it a certificate. Ends on Ctrl-C or
    SIGTERM, after calls in flight have ended.

    \b
    interlock serve
    interlock serve --tools my_tools.py --port 9000
    interlock serve --host 0.0.0.0 --name tools.example.com --cert chain.pem --key key.pem
    interlock serve --stdio
    """
    if (given["cert"] is None) != (given["key"] is None):
        raise click.UsageError("TLS needs both --cert and --key")
    if given["cert"] is not None:
        _try_certificate(given["cert"], given["key"])
    _check_names(given)
    _check_packages()
    if not given["stdio"]:
        refuse_token("serving a data directory")
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_stdio(out, given) if given["stdio"] else _serve(out, given))


def _check_packages() -> None:
    from interlock.api.packages import REMEDY, misfits
    from interlock.core.errors import Failure

    if found := misfits():
        raise Failure("E3804", f"libraries do not fit: {'; '.join(found)}", resolution=REMEDY)


def _check_names(given: dict[str, Any]) -> None:
    for name in given["names"]:
        if not _NAME.fullmatch(name):
            raise click.UsageError(f"--name takes a host name or an address, without a scheme or a port: not `{name}`")
    urls = [("--origin", one) for one in given["origins"]]
    urls += [] if given["public_url"] is None else [("--public-url", given["public_url"])]
    for option, url in urls:
        if not _URL.fullmatch(url):
            raise click.UsageError(f"{option} takes scheme and host, say https://tools.example.com: not `{url}`")


_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
_URL = re.compile(r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")


def _try_certificate(certificate: Path, key: Path) -> None:
    import ssl

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        words = f"`{certificate}` and `{key}` are no certificate (PEM) and its unlocked private key: {reason}"
        raise click.UsageError(words) from None


def _no_password() -> str:
    raise ValueError("the key is locked by a password")


async def _serve(out: Output, given: dict[str, Any]) -> int:
    import asyncio

    from interlock.api.interlock import Interlock
    from interlock.api.service import Service
    from interlock.core.errors import Failure
    from interlock.doors.listening import Listening
    from interlock.doors.server import serving

    listening = Listening(
        host=given["host"],
        port=given["port"],
        ports={name: given[f"{name}_port"] for name in default_ports() if not given[f"no_{name}"]},
        certificate=given["cert"],
        key=given["key"],
        names=given["names"],
        drain_s=given["drain_timeout"],
        origins=[one.rstrip("/") for one in given["origins"]],
        public_url=None if given["public_url"] is None else given["public_url"].rstrip("/"),
    )
    ended = _on_signals()
    async with Interlock.open(out.session.path, resume_approved=True) as app:
        app.end_with_lease()
        prepare_server(app)
        await _prepare(app, given)
        app.warm_up()
        async with serving(Service(app), listening) as server:
            token = await _token(app) if _shows_token(out, given["shows_token"]) else None
            await _tell(out, app, listening, server, token)
            warming = asyncio.create_task(_warm(server))
            watching = asyncio.create_task(_end_if_lost(app, ended))
            await ended.wait()
            warming.cancel()
            watching.cancel()
            if app.instance.lost:
                raise Failure("E3801", _LOST)
            await _leave_balancers(server, ended, given["shutdown_delay"])
            _end_sooner_on_the_next(server)
            if not out.as_json:
                words = f"ending: calls in flight have {listening.drain_s} s to finish …"
                out.page(error=True).line(words)
    return 0


def _shows_token(out: Output, asked: bool | None) -> bool:
    """Whether to print a token. Unless it was asked for, it is printed to a terminal only: logs and pipes keep it."""
    return out.stdout.isatty() if asked is None else asked


async def _warm(server: Server) -> None:
    from interlock.core.collector import exempt_loaded_modules

    await server.warm()
    exempt_loaded_modules()


def _on_signals() -> asyncio.Event:
    """The event that is set when the program is asked to end."""
    import asyncio
    import signal

    ended = asyncio.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(one, ended.set)
    return ended


_LOST = "this process did not renew its lease in time, and others closed its calls; it ends, to be started again"


async def _end_if_lost(app: Interlock, ended: asyncio.Event) -> None:
    """End a server that others have taken for dead: it may not write any more, and each of its calls would fail."""
    import asyncio

    while not app.instance.lost:  # noqa: ASYNC110 - the lease is renewed by a thread
        await asyncio.sleep(_LOOKS_S)
    ended.set()


async def _leave_balancers(server: Server, ended: asyncio.Event, delay_s: float) -> None:
    """Serve for a while longer and say that this server is not ready. A second signal ends the wait."""
    import asyncio

    ended.clear()
    server.announce_end()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await ended.wait()


def _end_sooner_on_the_next(server: Server) -> None:
    """A second Ctrl-C ends the wait for calls; a third one also that for the answers to their callers."""
    import asyncio
    import signal

    loop = asyncio.get_running_loop()

    def again() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        server.hurry()

    loop.add_signal_handler(signal.SIGINT, again)


async def _stdio(out: Output, given: dict[str, Any]) -> int:
    import asyncio

    from interlock.api.interlock import Interlock
    from interlock.api.service import Service
    from interlock.core.collector import collect_seldom, exempt_loaded_modules
    from interlock.core.errors import Failure
    from interlock.doors.opening import open_stdio

    token = os.environ.get(TOKEN)
    ended = _on_signals()
    async with Interlock.open(out.session.path, resume_approved=True) as app:
        app.end_with_lease()
        prepare_server(app)
        # Stdout is the client's from the first byte, also while modules with tools are loaded.
        with Output(as_json=True, session=out.session).reserved():
            await _prepare(app, given)
        app.warm_up()
        service = Service(app)
        door = open_stdio(service)
        collect_seldom()
        exempt_loaded_modules()
        watching = asyncio.ensure_future(_end_if_lost(app, ended))
        serving, asked = asyncio.ensure_future(door.run_stdio(token=token)), asyncio.ensure_future(ended.wait())
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            # Calls in flight are finished first, and answered: the client may still be listening.
            await door.drain(given["drain_timeout"])
            await asyncio.sleep(_FLUSH_S)
            serving.cancel()
        asked.cancel()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # we asked for it
            await serving
        await service.close()
        if app.instance.lost:
            raise Failure("E3801", _LOST)
    return 0


# How often a server looks whether it still has its lease.
_LOOKS_S = 1.0
# How long an answer may take from the end of its call to the client's pipe.
_FLUSH_S = 0.1


async def _prepare(app: Interlock, given: dict[str, Any]) -> None:
    """Add the tools that were asked for; on an empty data directory, some to try."""
    for target in given["targets"]:
        for found in await app.add_from(target):
            if not found.admitted:
                raise found.verdict.failure(found.tool)
    if not given["bare"] and not await app.tools.named.addresses():
        await app.add_from("interlock.demo_tools")


async def _token(app: Interlock) -> str:
    """A token for an agent of the local user, which every tool may be called with and nothing administered."""
    from interlock.api.identities import named_here
    from interlock.call.capability import ToolGrant

    user = app.caller.id.removeprefix("local:")
    agent, person = await named_here(app, "my-agent", "agent"), await named_here(app, user, "human")
    return await app.tokens.issue(
        subject=agent.did, user=person.did, scopes=(), tools=[ToolGrant("*")], ttl_s=8 * 3600, by=app.caller
    )


async def _tell(out: Output, app: Interlock, listening: Listening, server: Server, token: str | None) -> None:
    scheme = "https" if listening.secure else "http"
    # An address that stands for all of them is no name to call by.
    everywhere = listening.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    host = listening.names[0] if listening.names else "127.0.0.1" if everywhere else listening.host
    host = f"[{host}]" if ":" in host else host
    base = listening.public_url or f"{scheme}://{host}:{server.port}"
    tools = await app.tools.named.addresses()
    places = list(addresses(base, host, server.ports))
    document: dict[str, Any] = {"base_url": base, **{one.name: one.url for one in places}}
    document |= {"tools": len(tools), "home": str(app.home.path), "token": token}
    if listening.loopback:
        reach = ""
    elif everywhere and not listening.names:
        reach = "; clients elsewhere are refused until you say by which name they call: --name HOST"
    else:
        reach = ", to the network"
    if not listening.loopback and not listening.secure:
        words = (
            "tokens and results travel in clear; give it --cert and --key, or let a proxy that has them stand in front"
        )
        out.page(error=True).line(f"warning: this is plain HTTP on a network: {words}")
    out.answer(document, lambda page: _show(page, document, places, tools, reach))


def _show(page: Page, facts: dict[str, Any], places: list[Address], tools: list[str], reach: str) -> None:
    demo = bool(tools) and all(one.startswith("demo.") for one in tools)
    what = f"{len(tools)} demonstration tools" if demo else f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
    page.line(f"Interlock {__version__} serves {what}{reach}")
    for _, label, url in places:
        if url is not None:
            page.line(f"  {label:<9} {url}")
    page.line(f"  {'Data':<9} {facts['home']}")
    token: str | None = facts["token"]
    page.line("")
    if token is None:
        page.line("Calls need a token; one is printed to a terminal only, or with --token. To issue one:")
        issue = f"{_program()} --home {shlex.quote(facts['home'])} token issue --agent my-agent --ttl 8h"
        page.line(f"export TOKEN=$({issue})", whole=True)
    else:
        page.line("A token for an agent of yours, good for 8 hours (others: interlock token issue):")
        page.line(f"export TOKEN={token}", whole=True)
    page.line("")
    page.line("A first call:")
    page.line(_curl(facts["rest"], tools), whole=True)
    page.line("")
    page.line("An MCP client takes this:")
    entry = {"type": "http", "url": facts["mcp"], "headers": {"Authorization": f"Bearer {token or 'TOKEN'}"}}
    page.line(json.dumps({"mcpServers": {"interlock": entry}}), whole=True)
    page.line("")
    if demo or not tools:
        page.line("Your own tools: interlock tools add FILE.py    Other people's: interlock upstream add --help")
    if _program() != "interlock":
        page.line(f"interlock is not on the PATH of this shell: write {_program()} for it")
    page.line("Approvals: interlock approvals watch    End: Ctrl-C")


def _program() -> str:
    """The command that starts this program: its name, or its path if the name is not found, as in a checkout."""
    here = Path(sys.executable).with_name("interlock")
    return "interlock" if shutil.which("interlock") or not here.exists() else shlex.quote(str(here))


def _curl(rest: str, tools: list[str]) -> str:
    authority = '-H "Authorization: Bearer $TOKEN"'
    if "demo.balance" not in tools:
        return f"curl -s {rest}/tools {authority}"
    body = {"tool_id": "demo.balance", "parameters": {"account": "cash"}}
    headers = f"-H 'Content-Type: application/json' {authority}"
    return f"curl -s {rest}/tools/invoke {headers} -d '{json.dumps(body)}'"
