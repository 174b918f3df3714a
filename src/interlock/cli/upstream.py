"""`interlock upstream`: make other people's tools governed ones, and look after where they come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from interlock.cli.command import Output, at_server, looking, over_home
from interlock.upstreams.kinds import KINDS

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Page
    from interlock.core.errors import Failure
    from interlock.upstreams.manager import Report

Json = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def upstream() -> None:
    """MCP servers, OpenAPI, HTTP, gRPC and WebSocket services, LangChain tools and function schemas, all governed.

    What an upstream says of itself is not believed: its tools count as irreversible, and a person is asked for every
    call, until you accept its hints or say better in an overlay file.

    \b
    interlock upstream add mcp files -- npx -y @modelcontextprotocol/server-filesystem /srv/data
    interlock upstream add openapi petstore openapi.yaml --accept-hints
    interlock upstream list
    """


@upstream.group()
def add() -> None:
    """Connect to an upstream and offer its tools for admission.

    \b
    interlock upstream add mcp time -- python -m mcp_server_time
    interlock upstream add mcp search https://mcp.example.com/mcp --secret Authorization=search-token
    interlock upstream add grpc stock stock.example.com:443 --overlay stock.yaml
    """


def _adding(kind: str) -> Callable[[Callable[..., Json]], Callable[..., None]]:
    """Make a command of a function that turns its arguments into a configuration."""

    def wrap(configure: Callable[..., Json]) -> Callable[..., None]:
        @functools.wraps(configure)
        async def run(
            lock: Interlock,
            out: Output,
            /,
            name: str,
            overlay: Path | None,
            accept_hints: bool,
            no_prefix: bool,
            allow_private: bool,
            secrets: tuple[str, ...],
            dry_run: bool,
            **given: Any,
        ) -> int:
            from interlock.core.errors import Failure

            config = configure(**given)
            config |= _secrets(kind, secrets)
            if accept_hints:
                config["accept_hints"] = True
            if no_prefix:
                config["prefix"] = False
            if allow_private:
                config["allow_private"] = True
            said = None if overlay is None else _overlay(overlay)
            log = lock.home.path / "logs" / f"{name}.log"
            logged = log.stat().st_size if log.exists() else 0
            try:
                if dry_run:
                    report = await lock.upstreams.try_connecting(name, kind, config, said)
                else:
                    report = await lock.upstreams.add(name, kind, config, by=lock.caller, overlay=said)
            except Failure as failure:
                raise _explained(failure, _said(log, logged)) from None
            out.answer(report.document(), lambda page: _show_report(page, report, hints=accept_hints, dry_run=dry_run))
            return 0

        command = over_home(run)
        for option in reversed(_OPTIONS):
            command = option(command)
        return command

    return wrap


def _explained(failure: Failure, said: str) -> Failure:
    """A failure to add an upstream, in the words of whoever types the command."""
    from interlock.core.errors import Failure

    message, advice = failure.in_full, failure.resolution
    if failure.code == "E3406" and "private" in message:
        advice = "if it is meant to be there: --allow-private"
    if failure.code == "E3502" and said:
        message, advice = f"{message}; it said:\n{said}", "correct the command, and try whether it runs by itself"
    return Failure(failure.code, message, details=failure.details, resolution=advice)


def _said(log: Path, since: int) -> str:
    """The last that a program wrote to its log, without the secrets it was lent."""
    if not log.exists():
        return ""
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(since if since <= size else 0, size - 10_000))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in dict.fromkeys(lines[-8:]))


_OPTIONS = (
    click.option("--overlay", type=_FILE, help="What you say of its tools (YAML or JSON), kept under version control."),
    click.option("--accept-hints", is_flag=True, help="Believe what it says of its tools: readOnlyHint, GET."),
    click.option("--no-prefix", is_flag=True, help="Serve its tools under their own names, without NAME in front."),
    click.option("--allow-private", is_flag=True, help="Let it be on loopback or a private network."),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="WHERE=NAME",
        help="Lend the secret NAME as an environment variable or header; repeat.",
    ),
    click.option("--dry-run", is_flag=True, help="Connect and show what there is; change nothing."),
)


def _secrets(kind: str, given: tuple[str, ...]) -> Json:
    """How a secret is shown to the upstream: as an environment variable, or as a header."""
    pairs = [one.partition("=") for one in given]
    for where, equals, name in pairs:
        if not (where and equals and name):
            raise click.UsageError("--secret is written WHERE=NAME, such as Authorization=my-token")
    if not pairs:
        return {}
    if KINDS[kind].named_secrets:
        return {"credentials": {where: name for where, _, name in pairs}}
    if len(pairs) > 1:
        raise click.UsageError("one --secret is enough for this kind of upstream")
    where, _, name = pairs[0]
    if where.lower() == "authorization":
        return {"auth": {"kind": "bearer", "secret": name}}
    return {"auth": {"kind": "header", "name": where, "secret": name}}


def _overlay(path: Path) -> Json:
    from interlock.upstreams.overlay import parse_overlay

    return parse_overlay(path.read_text()).model_dump(mode="json", exclude_unset=True)


def _document(path: Path) -> Json:
    from interlock.core.errors import Failure

    found = _parsed(path)
    if not isinstance(found, dict):
        raise Failure("E3004", f"`{path.name}` does not hold an object")
    return cast("Json", found)


def _parsed(path: Path) -> Any:
    """The one YAML or JSON document of a file."""
    from interlock.core.errors import Failure
    from interlock.data.documents import Malformed, read_yaml

    try:
        documents = read_yaml(path.read_bytes())
    except FileNotFoundError:
        raise click.UsageError(f"no such file: {path}") from None
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None
    except Malformed as error:
        raise Failure("E3004", f"`{path.name}` is neither YAML nor JSON: {error}") from None
    return documents[0] if len(documents) == 1 else None


@add.command("mcp")
@click.argument("name")
@click.argument("where", nargs=-1, required=True, metavar="URL | -- COMMAND...")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Set a variable for the command; repeat.")
@click.option("--cwd", type=click.Path(exists=True, file_okay=False), help="Where the command runs.")
@_adding("mcp")
def add_mcp(where: tuple[str, ...], env: tuple[str, ...], cwd: str | None) -> Json:
    """A Model Context Protocol server: the command that starts it, or its address."""
    if len(where) == 1 and where[0].startswith(("http://", "https://")):
        return {"url": where[0]}
    if any(not one.partition("=")[1] for one in env):
        raise click.UsageError("--env is written NAME=VALUE, such as TZ=UTC")
    variables = dict(one.split("=", 1) for one in env)
    return {"command": list(where), "env": variables, **({} if cwd is None else {"cwd": cwd})}


@add.command("openapi")
@click.argument("name")
@click.argument("document", metavar="URL|FILE")
@click.option("--url", "urls", multiple=True, metavar="URL", help="Where the service is; repeat for failover.")
@_adding("openapi")
def add_openapi(document: str, urls: tuple[str, ...]) -> Json:
    """An HTTP service, by its OpenAPI 3 document."""
    from urllib.parse import urlsplit

    if document.startswith(("http://", "https://")):
        parts = urlsplit(document)
        return {"openapi": document, "urls": list(urls) or [f"{parts.scheme}://{parts.netloc}"]}
    read = _document(Path(document))
    entries = cast("list[Json]", read.get("servers") or [])
    servers = [str(one["url"]) for one in entries if isinstance(one, dict) and "url" in one]  # pyright: ignore[reportUnnecessaryIsInstance] - from a file
    found = list(urls) or [one for one in servers if one.startswith(("http://", "https://"))][:3]
    if not found:
        raise click.UsageError("the document names no server; say --url")
    return {"openapi": read, "urls": found}


@add.command("grpc")
@click.argument("name")
@click.argument("targets", nargs=-1, required=True, metavar="HOST:PORT...")
@click.option("--plaintext", is_flag=True, help="Without TLS; only on private networks.")
@_adding("grpc")
def add_grpc(targets: tuple[str, ...], plaintext: bool) -> Json:
    """A gRPC service, by its reflection."""
    return {"targets": list(targets), **({"plaintext": True} if plaintext else {})}


@add.command("functions")
@click.argument("name")
@click.argument("declarations", type=_FILE, metavar="FILE")
@click.option(
    "--url", "urls", multiple=True, required=True, metavar="URL", help="Who carries them out; repeat for failover."
)
@click.option("--path", default="/{function}", show_default=True, help="Where at URL each function is.")
@_adding("functions")
def add_functions(declarations: Path, urls: tuple[str, ...], path: str) -> Json:
    """Function schemas as OpenAI, Anthropic or Gemini take them, carried out by an HTTP service.

    FILE holds the `tools` of a request, in any of these forms. Each call POSTs its arguments, as JSON, to the path of
    its function; the answer is its result. `interlock tools export` tells `strict` and `defer_loading` again.

    \b
    interlock upstream add functions weather tools.json --url https://functions.example.com --overlay weather.yaml
    """
    found = _parsed(declarations)
    if not isinstance(found, dict | list):
        raise click.UsageError(f"{declarations.name} holds neither a declaration nor a list of them")
    return {"declarations": found, "urls": list(urls), "path": path}


@add.command("langchain")
@click.argument("name")
@click.argument("module")
@_adding("langchain")
def add_langchain(module: str) -> Json:
    """The LangChain tools of a Python module, which run in this process."""
    return {"module": module}


def _add_by_file(kind: str) -> None:
    def configure(config: Path) -> Json:
        return _document(config)

    configure.__doc__ = KINDS[kind].help
    command = click.argument("config", type=_FILE)(_adding(kind)(configure))
    add.command(kind)(click.argument("name")(command))


for _kind in KINDS.keys() - add.commands.keys():
    _add_by_file(_kind)

# Looking after them


async def _list_at_server(server: Server, out: Output, /) -> int:
    return _answer_list(out, await server.get("/v1/upstreams"))


@upstream.command("list")
@at_server(_list_at_server)
@looking
async def list_upstreams(lock: Interlock, out: Output, /) -> int:
    """Every upstream, whether it answers, and what it offers; then the breakers of services that are no upstreams."""
    known = lock.upstreams
    documents: list[Json] = [
        {**one.document(), "tools": [tool.document() for tool in known.offers(one.name)]} for one in known.list()
    ]
    # Services that tools name (`external_service`) have breakers too, and are no upstreams.
    names = {str(one["name"]) for one in documents}
    others = [one.document() for one in lock.gateway.execution.services.snapshot() if one.name not in names]
    return _answer_list(out, {"upstreams": documents, "services": others})


def _answer_list(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        rows = [
            (one["name"], one["kind"], one["state"], _counts([tool["state"] for tool in one["tools"]]), one["reason"])
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


def _counts(states: list[str]) -> str:
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"


async def _show_at_server(server: Server, out: Output, /, name: str) -> int:
    from interlock.cli.remote import part

    return _answer_show(out, await server.get(f"/v1/upstreams/{part(name)}"))


@upstream.command()
@at_server(_show_at_server)
@click.argument("name")
@looking
async def show(lock: Interlock, out: Output, /, name: str) -> int:
    """One upstream, its breakers and each of its tools; of those that changed, what differs from when admitted.

    Of a service that tools name and that is no upstream (external_service), its breakers.
    """
    services = [one.document() for one in lock.gateway.execution.services.snapshot() if one.name == name]
    if services and all(one.name != name for one in lock.upstreams.list()):
        return _show_service(out, name, services)
    return _answer_show(out, {**lock.upstreams.document(name), "services": services})


def _answer_show(out: Output, document: Json) -> int:
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


def _show_service(out: Output, name: str, services: list[Json]) -> int:
    def write(page: Page) -> None:
        page.line(f"{name} is no upstream, but a service that tools name (external_service)")
        for one in services:
            page.line(_breaker(one))

    out.answer({"name": name, "kind": "external_service", "services": services}, write)
    return 0


def _words(value: Any) -> str:
    import orjson

    return value if isinstance(value, str) else orjson.dumps(value).decode()


@upstream.command()
@click.argument("name")
@click.option("--overlay", type=_FILE, help="Say something else of its tools from now on.")
@over_home
async def refresh(lock: Interlock, out: Output, /, name: str, overlay: Path | None) -> int:
    """Look again at what it offers. What has changed is kept out until you accept it."""
    said = None if overlay is None else _overlay(overlay)
    report = await lock.upstreams.refresh(name, by=lock.caller, overlay=said)
    hints = bool(lock.upstreams.get(name).config.get("accept_hints"))
    out.answer(report.document(), lambda page: _show_report(page, report, hints=hints))
    return 0


@upstream.command()
@click.argument("name")
@click.argument("tools", nargs=-1)
@click.option("--reason", required=True, help="Why; it goes on record.")
@click.option(
    "--shown",
    multiple=True,
    metavar="TOOL=DIGEST",
    help="Only if it is still what `show --json` gave as `seen`; repeat.",
)
@over_home
async def accept(
    lock: Interlock, out: Output, /, name: str, tools: tuple[str, ...], reason: str, shown: tuple[str, ...]
) -> int:
    """Accept definitions that changed, as new versions; all of them unless you name some."""
    looked_at = {tool: digest for tool, _, digest in (one.rpartition("=") for one in shown)}
    report = await lock.upstreams.accept(name, by=lock.caller, tools=tools, reason=reason, shown=looked_at)
    hints = bool(lock.upstreams.get(name).config.get("accept_hints"))
    out.answer(report.document(), lambda page: _show_report(page, report, hints=hints))
    return 0


async def _probe_at_server(server: Server, out: Output, /, name: str) -> int:
    from interlock.cli.remote import part

    return _answer_probe(out, await server.post(f"/v1/upstreams/{part(name)}/probe", {}, timeout_s=120.0))


@upstream.command()
@at_server(_probe_at_server)
@click.argument("name")
@over_home
async def probe(lock: Interlock, out: Output, /, name: str) -> int:
    """Ask whether it answers, now."""
    state = await lock.upstreams.probe(name)
    return _answer_probe(out, {"name": name, "state": state, "reason": lock.upstreams.get(name).reason})


def _answer_probe(out: Output, document: Json) -> int:
    out.answer(document, lambda page: page.line(f"{document['state']} {document['reason']}".strip()))
    return 0 if document["state"] == "available" else 1


@upstream.command()
@click.argument("name")
@over_home
async def remove(lock: Interlock, out: Output, /, name: str) -> int:
    """Let go of it. Its tools can no longer be called; what they did stays on record."""
    await lock.upstreams.remove(name, by=lock.caller)
    out.answer({"name": name, "state": "removed"}, lambda page: page.line(f"{name} was removed"))
    return 0


def _show_report(page: Page, report: Report, *, hints: bool, dry_run: bool = False) -> None:
    rows = [
        (one.name, one.address or "-", one.mutation_class or "-", one.state, one.reason or one.why)
        for one in report.tools
    ]
    if rows:
        page.table(rows, ("tool", "served as", "class", "", "why"))
    needs = [(one.name, ", ".join(one.needs)) for one in report.tools if one.needs]
    if needs:
        page.line("")
        page.line("Assumed here, because the upstream does not state it; state it in an overlay:")
        page.table(needs, indent="  ")
    unsure = sum(one.mutation_class == "write_irreversible" and one.state != "refused" for one in report.tools)
    page.line("")
    if dry_run:
        page.line(f"{len(report.tools)} tools; nothing was changed")
    else:
        page.line(_counts([one.state for one in report.tools]))
    if report.count("changed"):
        page.line(f"What changed is kept out. Look: interlock upstream show {report.upstream}")
        page.line(f"Take it as it is now: interlock upstream accept {report.upstream} --reason WHY")
    if unsure:
        which = "all of them" if unsure == len(report.tools) else f"{unsure} of them"
        better = "an overlay" if hints else "an overlay, or --accept-hints,"
        page.line(f"A person is asked for every call of {which}, until {better} states otherwise.")
