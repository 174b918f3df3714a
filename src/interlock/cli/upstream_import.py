"""`interlock upstream import`: govern all MCP servers of a client's configuration, and write its replacement."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from interlock.cli.command import over_home
from interlock.cli.output import Output
from interlock.cli.upstream_add import counts, explained, last_output, show_alone, trying_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.api.interlock import Interlock
    from interlock.api.types import ClientConfig
    from interlock.cli.render import Page
    from interlock.core.errors import Failure

Json = dict[str, Any]
T = TypeVar("T")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("import", short_help="Govern every MCP server of a client's configuration.")
@click.argument("file", type=_FILE)
@click.option("--dry-run", is_flag=True, help="Show the plan; start no server, store and write nothing.")
@click.option("--accept-hints", is_flag=True, help="Trust the servers' statements about their tools: readOnlyHint.")
@click.option("--allow-private", is_flag=True, help="Allow addresses on loopback or a private network.")
@click.option("--plain", multiple=True, metavar="NAME", help="This variable or header is no credential; repeat.")
@click.option("--only", multiple=True, metavar="NAME", help="Import this server alone, by its name in FILE; repeat.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="The new file [default: FILE.interlock.json]."
)
@over_home
async def import_(
    app: Interlock,
    out: Output,
    /,
    file: Path,
    dry_run: bool,
    accept_hints: bool,
    allow_private: bool,
    plain: tuple[str, ...],
    only: tuple[str, ...],
    output: Path | None,
) -> int:
    """Govern every MCP server that a client's configuration FILE lists.

    FILE has `mcpServers` (Claude Desktop, Claude Code, Cursor) or `servers` (VS Code). Credentials among variables and
    headers are sealed in the store of secrets. A new file beside FILE has Interlock as its only server; FILE itself is
    not changed. Exits 1 if a server could not be added; the others are.

    \b
    interlock upstream import ~/.cursor/mcp.json --dry-run
    interlock upstream import .vscode/mcp.json --accept-hints
    """
    from interlock.api.upstream_import import import_servers, plan

    found = _servers_in(file, _nobody if dry_run else _ask, plain)
    if missing := set(only) - {one.name for one in found.entries}:
        raise click.UsageError(f"--only: there is no server `{min(missing)}` in {file.name}")
    entries = [one for one in found.entries if not only or one.name in only]
    target = file.with_name(f"{file.name.removesuffix('.json')}.interlock.json") if output is None else output
    _check_target(target)
    more: Json = ({"accept_hints": True} if accept_hints else {}) | ({"allow_private": True} if allow_private else {})
    if dry_run:
        return _answer(out, [plan(one, more) for one in entries], target, dry_run=True)
    logs = app.home.path / "logs"
    sizes = {path.stem: path.stat().st_size for path in logs.glob("*.log")}

    def explain(name: str, failure: Failure) -> Failure:
        return explained(failure, last_output(logs / f"{name}.log", sizes.get(name, 0)))

    def begin(name: str) -> None:
        out.progress(f"connecting to {name} …")

    with trying_out(app, out, "reading the file …"):
        reports = await import_servers(app, entries, more=more, explain=explain, begin=begin)
    governed = any(one["state"] in ("added", "known") for one in reports)
    if governed:
        command = [*_command(), "--home", str(app.home.path.absolute()), "serve", "--stdio", "--bare"]
        _write(target, found.replaced(command))
    return _answer(out, reports, target if governed else None, must_leave=await app.approvals.must_leave(app.caller))


def _servers_in(file: Path, ask: Callable[[str, str, bool], str | None], plain: tuple[str, ...]) -> ClientConfig:
    from interlock.api.upstream_files import servers_in

    return _read(file, lambda file: servers_in(file, environment=os.environ, ask=ask, plain=plain))


def _read(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror or type(error).__name__}") from None


def _nobody(name: str, description: str, password: bool) -> str | None:
    # The plan needs no values: an answer would be asked for when it is carried out.
    return f"<{name}>"


def _ask(name: str, description: str, password: bool) -> str | None:
    if not sys.stdin.isatty():
        return None
    value: str = click.prompt(f"{description} ({name})", hide_input=password, err=True)
    return value


def _command() -> list[str]:
    script = Path(sys.executable).parent / "interlock"
    return [str(script)] if script.exists() else [sys.executable, "-m", "interlock.cli"]


def _check_target(target: Path) -> None:
    """Refuse to write over a file that lists other servers than Interlock, before anything is done."""
    from interlock.api.upstream_files import lists_interlock_alone

    if target.exists() and not _read(target, lists_interlock_alone):
        raise click.UsageError(f"{target} exists, and lists other servers than Interlock; move it, or give --output")


def _write(target: Path, document: Json) -> None:
    """Write the file whole or not at all, readable by its owner only: other parts of it may be private."""
    import json

    from interlock.core.errors import Failure

    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        os.replace(draft, target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        words = f"the servers are added, but `{target}` cannot be written: {error.strerror or type(error).__name__}"
        raise Failure("E3801", words, resolution="import again, with --output FILE") from None


def _answer(
    out: Output, reports: list[Json], target: Path | None, *, dry_run: bool = False, must_leave: bool = False
) -> int:
    document = {"servers": reports, "dry_run": dry_run, "written": None if dry_run or target is None else str(target)}
    out.answer(document, lambda page: _show(page, reports, target, dry_run=dry_run, must_leave=must_leave))
    return 1 if any(one["state"] == "refused" for one in reports) else 0


def _show(page: Page, reports: list[Json], target: Path | None, *, dry_run: bool, must_leave: bool) -> None:
    from interlock.cli.render import BAD, GOOD, MAYBE, show_message

    marks = {"added": GOOD, "known": GOOD, "planned": GOOD, "skipped": MAYBE, "refused": BAD}
    for one in reports:
        states = [str(tool["state"]) for tool in one["tools"]]
        words = one["state"] if dry_run or one["reason"] else f"{counts(states)} of {len(states)} tools"
        page.line(marks[one["state"]], f" {one['name']}", right=words)
        if one["reason"]:
            show_message(page, one["reason"])
        if one.get("next"):
            page.facts([("next", one["next"])])
        facts = [("upstream", one["upstream"])] if one["upstream"] and one["state"] == "planned" else []
        if one["runs"] and one["state"] == "planned":
            facts.append(("runs", one["runs"] if isinstance(one["runs"], str) else " ".join(one["runs"])))
        facts += [("sealed", f"{where}, as the secret {name}") for where, name in one["credentials"].items()]
        if one["in_clear"]:
            facts.append(("in clear", ", ".join(one["in_clear"])))
        facts += [("note", note) for note in one["notes"]]
        for tool in one["tools"]:
            if tool["state"] == "refused":
                facts.append((f"refused {tool['name']}", tool["reason"] or tool["why"]))
        if one["state"] in ("planned", "added"):
            page.facts(facts)
    page.line("")
    _advise(page, reports, target, dry_run=dry_run, must_leave=must_leave)


def _advise(page: Page, reports: list[Json], target: Path | None, *, dry_run: bool, must_leave: bool) -> None:
    governed = [one for one in reports if one["state"] in ("added", "known")]
    left = [one["name"] for one in reports if one["state"] == "refused"]
    if dry_run:
        page.line(f"nothing was started, stored or written; the new configuration would be {target}")
        return
    page.line(f"{len(governed)} of {len(reports)} servers are governed")
    if target is not None:
        page.line(f"The new configuration is {target}: give it to your client in place of the old one.")
        if any(one["credentials"] for one in reports):
            page.line("The old one still has credentials in clear; delete it when the new one works.")
    if left:
        page.line(f"Not in it: {', '.join(left)}. Correct them and import again; those that are governed stay.")
    asked = sum(tool["mutation_class"] == "write_irreversible" for one in governed for tool in one["tools"])
    if asked:
        page.line(f"A person is asked for every call of {asked} tools: interlock approvals watch. To change that for a")
        page.line("server, describe its tools: interlock upstream refresh NAME --overlay FILE")
        if must_leave:
            show_alone(page)
