"""`interlock upstream add`: one command for each kind of upstream. Kinds that a file configures need none here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from interlock.cli.command import at_server, over_home
from interlock.cli.output import Output
from interlock.contract.upstream_kinds import KINDS
from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Page
    from interlock.core.errors import Failure

Json = dict[str, Any]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
LOOK_S = 180.0  # a server waits 120 s for an upstream


@click.group()
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
        async def run(app: Interlock, out: Output, /, **given: Any) -> int:
            from interlock.api.upstreams import Upstreams
            from interlock.core.errors import Failure

            asked = _Asked.of(kind, configure, **given)
            upstreams = Upstreams(app, on_machine=True)
            log = app.home.path / "logs" / f"{asked.name}.log"
            logged = log.stat().st_size if log.exists() else 0
            try:
                add_it = upstreams.preview if asked.dry_run else upstreams.add
                with trying_out(app, out, f"connecting to {asked.name} and trying out its tools …"):
                    report = await add_it(asked.name, kind, asked.config, by=app.caller, overlay=asked.overlay)
            except Failure as failure:
                raise explained(failure, last_output(log, logged)) from None
            return answer_report(
                out, report, dry_run=asked.dry_run, must_leave=await app.approvals.must_leave(app.caller)
            )

        async def ask(server: Server, out: Output, /, **given: Any) -> int:
            asked = _Asked.of(kind, configure, **given)
            fields = {"name": asked.name, "kind": kind, "config": asked.config, "overlay": asked.overlay}
            path = "/v1/upstreams/preview" if asked.dry_run else "/v1/upstreams"
            with out.working(f"the server connects to {asked.name} and tries out its tools …"):
                report = await server.post(path, fields, timeout_s=LOOK_S)
            return answer_report(out, report, dry_run=asked.dry_run)

        command = at_server(ask)(over_home(run))
        for option in reversed(_OPTIONS):
            command = option(command)
        return command

    return wrap


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of a command that adds an upstream."""

    name: str
    config: Json
    overlay: Json | None
    dry_run: bool

    @classmethod
    def of(
        cls,
        kind: str,
        configure: Callable[..., Json],
        *,
        name: str,
        overlay: Path | None,
        accept_hints: bool,
        no_prefix: bool,
        allow_private: bool,
        secrets: tuple[str, ...],
        idempotency: str | None,
        dry_run: bool,
        **given: Any,
    ) -> _Asked:
        config = configure(**given) | _secrets(kind, secrets)
        if accept_hints:
            config["accept_hints"] = True
        if no_prefix:
            config["prefix"] = False
        if allow_private:
            config["allow_private"] = True
        stated = None if overlay is None else read_overlay(overlay)
        return cls(name, config, _with_idempotency(stated, idempotency), dry_run)


def _with_idempotency(overlay: Json | None, given: str | None) -> Json | None:
    """The overlay with where keys come from, for all tools that it does not say it of."""
    if given is None:
        return overlay
    stated = overlay or {}
    defaults: Json = stated.get("defaults", {})
    if defaults.get("idempotency", given) != given:
        raise click.UsageError(f"the overlay says idempotency: {defaults['idempotency']}, --idempotency says {given}")
    return {**stated, "defaults": {**defaults, "idempotency": given}}


def explained(failure: Failure, output: str) -> Failure:
    """A failure to add an upstream, with advice for this command."""
    from interlock.core.errors import Failure

    message, advice = failure.in_full, failure.resolution
    if failure.code == "E3406" and "private" in message:
        advice = "if it is meant to be there: --allow-private"
    if failure.code == "E3502" and output:
        message, advice = f"{message}; it said:\n{output}", "correct the command, and try whether it runs by itself"
    return Failure(failure.code, message, details=failure.details, resolution=advice)


def last_output(log: Path, since: int) -> str:
    """The last lines that a program wrote to its log. Secrets are masked there."""
    if not log.exists():
        return ""
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(since if since <= size else 0, size - 10_000))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in dict.fromkeys(lines[-8:]))


_OPTIONS = (
    click.option(
        "--overlay",
        type=_FILE,
        help="Your statements about its tools (YAML or JSON).",
    ),
    click.option("--accept-hints", is_flag=True, help="Trust its statements about its tools: readOnlyHint, GET."),
    click.option("--no-prefix", is_flag=True, help="Serve its tools under their own names, without NAME in front."),
    click.option("--allow-private", is_flag=True, help="Allow an address on loopback or a private network."),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="WHERE=NAME",
        help="Send the secret NAME as an environment variable or header; repeat.",
    ),
    click.option(
        "--idempotency",
        type=click.Choice(["caller", "request", "each"]),
        help="Where the idempotency key of a write comes from: the caller (default), the client's identity of the"
        " request, or nowhere: then each request is a new action.",
    ),
    click.option("--dry-run", is_flag=True, help="Connect and show its tools; change nothing."),
)


def _secrets(kind: str, given: tuple[str, ...]) -> Json:
    """The part of a configuration that sends secrets: as environment variables, or as a header."""
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


def read_overlay(path: Path) -> Json:
    """The overlay in a file."""
    from interlock.api.upstream_files import overlay_of

    return overlay_of(path.read_text())


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
        documents = read_yaml(_content(path))
    except Malformed as error:
        raise Failure("E3004", f"`{path.name}` is neither YAML nor JSON: {error}") from None
    return documents[0] if len(documents) == 1 else None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise click.UsageError(f"no such file: {path}") from None
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None


@add.command("mcp", short_help="A Model Context Protocol server: a command or address.")
@click.argument("name")
@click.argument("where", nargs=-1, required=True, metavar="URL | -- COMMAND...")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Set a variable for the command; repeat.")
@click.option("--cwd", type=click.Path(exists=True, file_okay=False), help="The working directory of the command.")
@click.option(
    "--protocol",
    type=click.Choice(["auto", "modern", "handshake"]),
    default="auto",
    show_default=True,
    help="The era to speak: modern (2026-07-28), handshake (before), or whichever keeps its questions working.",
)
@click.option(
    "--questions/--no-questions",
    default=True,
    show_default=True,
    help="Pass its questions during a call on to the client; over stdio, each caller that can be asked has a process.",
)
@click.option(
    "--logs/--no-logs",
    default=None,
    help="Pass its log messages on to clients that want them; by default only by URL, since it may take processes.",
)
@click.option(
    "--apps",
    is_flag=True,
    help="Tell it that clients show interfaces (MCP Apps): many servers have other tools for such clients.",
)
@click.option(
    "--tasks",
    type=click.Choice(["follow", "relay"]),
    default="follow",
    show_default=True,
    help="Follow its tasks for every client, or let it make tasks only for clients that take tasks themselves.",
)
@click.option(
    "--conversations-per-caller",
    type=click.IntRange(1, 256),
    metavar="N",
    help="The most conversations of their own that one caller may have open [default: 8 by command, 64 by URL].",
)
@_adding("mcp")
def add_mcp(
    where: tuple[str, ...],
    env: tuple[str, ...],
    cwd: str | None,
    protocol: str,
    questions: bool,
    logs: bool | None,
    apps: bool,
    tasks: str,
    conversations_per_caller: int | None,
) -> Json:
    """A Model Context Protocol server: the command that starts it, or its address."""
    config: Json = {} if protocol == "auto" else {"protocol": protocol}
    config |= {} if questions else {"questions": False}
    config |= {} if logs is None else {"logs": logs}
    config |= {"apps": True} if apps else {}
    config |= {} if tasks == "follow" else {"tasks": tasks}
    if conversations_per_caller is not None:
        config["conversations_per_caller"] = conversations_per_caller
    if len(where) == 1 and where[0].startswith(("http://", "https://")):
        return {"url": where[0], **config}
    if any(not one.partition("=")[1] for one in env):
        raise click.UsageError("--env is written NAME=VALUE, such as TZ=UTC")
    variables = dict(one.split("=", 1) for one in env)
    return {"command": list(where), "env": variables, **({} if cwd is None else {"cwd": cwd}), **config}


@add.command("openapi")
@click.argument("name")
@click.argument("document", metavar="URL|FILE")
@click.option("--url", "urls", multiple=True, metavar="URL", help="The address of the service; repeat for failover.")
@_adding("openapi")
def add_openapi(document: str, urls: tuple[str, ...]) -> Json:
    """An HTTP service, by its OpenAPI 3 or Swagger 2.0 document."""
    from urllib.parse import urlsplit

    from interlock.api.upstream_files import openapi_of, servers_of

    if document.startswith(("http://", "https://")):
        parts = urlsplit(document)
        return {"openapi": document, "urls": list(urls) or [f"{parts.scheme}://{parts.netloc}"]}
    read = openapi_of(_content(Path(document)))
    found = list(urls) or [one for one in servers_of(read) if one.startswith(("http://", "https://"))][:3]
    if not found:
        raise click.UsageError("the document names no server; give --url")
    return {"openapi": read, "urls": found}


@add.command("grpc")
@click.argument("name")
@click.argument("targets", nargs=-1, required=True, metavar="HOST:PORT...")
@click.option("--plaintext", is_flag=True, help="Without TLS; only for private networks.")
@_adding("grpc")
def add_grpc(targets: tuple[str, ...], plaintext: bool) -> Json:
    """A gRPC service, by its reflection."""
    return {"targets": list(targets), **({"plaintext": True} if plaintext else {})}


@add.command("functions", short_help="Function schemas, run by an HTTP service.")
@click.argument("name")
@click.argument("declarations", type=_FILE, metavar="FILE")
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="The service that runs them; may repeat.",
)
@click.option("--path", default="/{function}", show_default=True, help="The path of each function at URL.")
@_adding("functions")
def add_functions(declarations: Path, urls: tuple[str, ...], path: str) -> Json:
    """Function schemas as OpenAI, Anthropic or Gemini take them, run by an HTTP service.

    FILE holds the `tools` of a request, in any of these forms. Each call POSTs its arguments, as JSON, to the path of
    its function; the answer is its result. `interlock tools export` repeats `strict` and `defer_loading`.

    \b
    interlock upstream add functions weather tools.json --url https://functions.example.com --overlay weather.yaml
    """
    found = _parsed(declarations)
    if not isinstance(found, dict | list):
        raise click.UsageError(f"{declarations.name} holds neither a declaration nor a list of them")
    return {"declarations": found, "urls": list(urls), "path": path}


@add.command("langchain", short_help="The LangChain tools of a Python module.")
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
    add.command(kind, short_help=str(KINDS[kind].help).partition(":")[0])(click.argument("name")(command))


for _kind in KINDS.keys() - add.commands.keys():
    _add_by_file(_kind)


def counts(states: list[str]) -> str:
    """The number of tools in each state."""
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"


@contextmanager
def trying_out(app: Interlock, out: Output, words: str) -> Generator[None]:
    """Show what is done with an upstream while it lasts, and each of its tools that is tried out."""
    app.admissions.on_trial = lambda tool, done, total: out.progress(f"trying out {tool}", 100 * done / total)
    with out.working(words):
        yield


def show_alone(page: Page) -> None:
    """Tell the user of this machine that the calls of their own clients wait for somebody else."""
    advice = "If you are the only person here, say so once: interlock approvals alone"
    page.line(f"Your own calls, also by a client on this machine, wait for somebody else. {advice}")


def answer_report(out: Output, report: Json, *, dry_run: bool = False, must_leave: bool = False) -> int:
    """Show the result of one look at an upstream."""
    hints: bool = report.pop("accept_hints")
    out.answer(report, lambda page: _show_report(page, report, hints=hints, dry_run=dry_run, must_leave=must_leave))
    return 0


def _show_report(page: Page, report: Json, *, hints: bool, dry_run: bool, must_leave: bool) -> None:
    tools: list[Json] = report["tools"]
    rows = [
        (one["name"], one["tool_id"] or "-", one["mutation_class"] or "-", one["state"], one["reason"] or one["why"])
        for one in tools
    ]
    if rows:
        page.table(rows, ("tool", "served as", "class", "", "why"))
    needs = [(str(one["name"]), ", ".join(one["needs"])) for one in tools if one["needs"]]
    if needs:
        page.line("")
        page.line("Assumed here, because the upstream does not state it; state it in an overlay:")
        page.table(needs, indent="  ")
    unsure = sum(one["mutation_class"] == "write_irreversible" and one["state"] != "refused" for one in tools)
    page.line("")
    states = [str(one["state"]) for one in tools]
    page.line(f"{len(tools)} tools; nothing was changed" if dry_run else counts(states))
    if "changed" in states:
        page.line(f"Changed tools are kept out. Review them: interlock upstream show {report['upstream']}")
        page.line(f"Accept them as they are now: interlock upstream accept {report['upstream']} --reason WHY")
    if unsure:
        which = "all of them" if unsure == len(tools) else f"{unsure} of them"
        better = "an overlay" if hints else "an overlay, or --accept-hints,"
        page.line(f"A person is asked for every call of {which}, until {better} states otherwise.")
        if must_leave:
            show_alone(page)
