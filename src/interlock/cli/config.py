"""`interlock config`: what the settings are and where they come from, whether they can be used, and who has others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_server, looking, over_home, without_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import SharedConfig
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(short_help="Settings, policy and principals, here and on machines.")
def config() -> None:
    """The configuration: settings and their overrides, policy and principals, here and on all machines of the store.

    \b
    interlock config show --changed
    interlock config check
    interlock config diff
    interlock config push
    """


# show


async def _show_at_server(server: Server, out: Output, /, names: tuple[str, ...], changed: bool) -> int:
    return _answer_settings(out, {}, (await server.get("/v1/settings"))["settings"], names, changed)


@config.command(short_help="The settings in effect, and where each comes from.")
@at_server(_show_at_server)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--changed", is_flag=True, help="Only settings that are not at their default.")
@without_home
def show(out: Output, /, names: tuple[str, ...], changed: bool) -> int:
    """The settings in effect, or those named, and where each comes from. Credentials are masked.

    A setting comes from a variable of the environment, from settings.toml, from the configuration that all machines
    share (config push), or is the default. A server that was started with other variables, or before the file was
    changed, has other settings: --server shows those of a running server. Needs policy:admin there.

    \b
    interlock config show
    interlock config show store approval
    """
    from interlock.api.homes import home_at
    from interlock.api.settings_view import settings_at

    home = home_at(out.session.path)
    return _answer_settings(out, {"home": str(home.path)}, settings_at(home), names, changed)


def _answer_settings(out: Output, place: Json, settings: list[Json], names: tuple[str, ...], changed: bool) -> int:
    known = [str(one["name"]) for one in settings]
    for name in names:
        if name not in known:
            from interlock.core.variables import nearest

            meant = nearest(name, known)
            raise click.UsageError(f"there is no setting `{name}`" + (f"; did you mean `{meant}`?" if meant else ""))
    rows = [
        one for one in settings if (not names or one["name"] in names) and (not changed or one["source"] != "default")
    ]

    def show_rows(page: Page) -> None:
        import json

        from interlock.cli.render import Text

        def cell(one: Json) -> str:
            return json.dumps(one["value"], ensure_ascii=False)

        if not rows:
            page.line("every setting is at its default")
        page.table(
            [(str(one["name"]), Text(str(one["source"]), "dim"), cell(one)) for one in rows],
            ("setting", "source", "value") if rows else (),
        )

    out.answer({**place, "settings": rows}, show_rows)
    return 0


# check


@config.command(short_help="Check settings, policy and overlays; start nothing.")
@click.option("--overlay", "overlays", type=_FILE, multiple=True, help="An overlay of an upstream to check too.")
@without_home
def check(out: Output, /, overlays: tuple[Path, ...]) -> int:
    """Check settings, their variables, policy, principals and overlays, without starting anything. Exits 1 on a fault.

    Each fault is shown with its file and line, or its place in the file. The policy is checked against the tools of the
    store if there is one. With --home any directory with such files can be checked before they are copied.

    \b
    interlock config check
    interlock --home ./new config check --overlay github.overlay.yaml
    """
    from interlock.api.config_check import check_files
    from interlock.api.homes import home_at

    files = check_files(home_at(out.session.path), overlays)
    usable = not any(file.faults for file in files)
    document = {
        "usable": usable,
        "files": [{"file": one.file, "faults": one.faults, "warnings": one.warnings} for one in files],
    }

    def show_files(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD, MAYBE

        for one in files:
            if not one.faults:
                page.line(GOOD, f" {one.file}")
            page.table([(BAD, one.file, fault) for fault in one.faults])
            page.table([(MAYBE, one.file, warning) for warning in one.warnings])

    out.answer(document, show_files)
    return 0 if usable else 1


# diff


@config.command(short_help="What each machine on the store runs, and differences.")
@without_home
def diff(out: Output, /) -> int:
    """Compare the machines on the store: version, schema, policy, principals, settings, keys.

    Machines are compared by digests that their processes tell with their leases. A data directory without a running
    process tells nothing, except for this one. If a configuration was pushed to the store, the files here are compared
    with it line by line. A process that was started with other settings than are in force by now has to be restarted,
    and is named. Exits 1 if something differs.

    \b
    interlock config diff
    interlock config diff --json
    """
    from interlock.api.config_diff import compare_machines
    from interlock.api.homes import home_at

    found = compare_machines(home_at(out.session.path))
    shared = found.shared

    def show(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD

        page.table(
            [
                (one.machine, one.directory, f"{one.processes:,}", _words(one.versions), _words(one.schemas))
                for one in found.machines
            ],
            ("machine", "directory", "processes", "version", "schema"),
        )
        if not found.differences:
            alone = len(found.machines) < 2
            page.line(GOOD, " no other machine runs on this store" if alone else " all the same")
        for what, groups in found.differences.items():
            page.line(BAD, f" {what} differs")
            page.table([(f"    {value[:12] or '-'}", ", ".join(places)) for value, places in groups.items()])
        for place in found.stale:
            page.line(BAD, f" {place} runs with settings that were changed since: restart it")
        if shared is not None:
            _show_version(page, shared, "followed here" if found.followed else "not followed here")
        for name, changes in found.lines.items():
            page.line(BAD, f" {name} here is not the shared one" + (", and does not count" if found.followed else ""))
            _show_lines(page, changes)

    stored = None if shared is None else {**_document(shared), "followed": found.followed, "different": found.lines}
    machines = [one._asdict() for one in found.machines]
    out.answer({"agree": found.agree, "nodes": machines, "differences": found.differences, "shared": stored}, show)
    return 0 if found.agree else 1


def _show_lines(page: Page, lines: list[str]) -> None:
    from interlock.cli.render import Text

    for line in lines:
        page.line(Text(f"    {line}", {"+": "green", "-": "red"}.get(line[:1], "dim")))


def _show_version(page: Page, shared: SharedConfig, words: str) -> None:
    from interlock.cli.render import GOOD
    from interlock.core.clock import iso

    page.line(GOOD, f" shared version {shared.version} by {shared.by} at {iso(shared.at_ms)}, {words}")


def _document(shared: SharedConfig) -> Json:
    from interlock.api.shared_config import document

    return document(shared)


def _words(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "-"


# push, pull, history, rollback


@config.command(short_help="Make the files here those of all machines.")
@click.option(
    "--from", "source", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="A directory with some of policy.cedar, principals.toml and settings.toml [default: the data directory].",
)  # fmt: skip
@click.option("--instead-of", type=click.IntRange(0), metavar="VERSION", help="The version that this replaces.")
@over_home
async def push(app: Interlock, out: Output, /, source: Path | None, instead_of: int | None) -> int:
    """Make policy, principals and settings of this directory those of all machines that follow the store.

    Machines follow that state `shared_config = true` in settings.toml. They decide by a new policy and new principals
    within a second; settings count from their next start. Everything is checked first, as by interlock config check,
    and nothing is stored if there is a fault. Settings of one machine, such as store, are left out. Needs policy:admin.

    \b
    interlock config push
    interlock config pull new && interlock config push --from new --instead-of 1
    """
    from interlock.api.shared_config import SharedConfiguration
    from interlock.core.errors import Failure

    try:
        pushed = await SharedConfiguration(app).push_files(source, by=app.caller, instead_of=instead_of)
    except Failure as failure:
        faults: list[str] | None = (failure.details or {}).get("faults")
        if failure.code != "E3004" or faults is None:
            raise
        out.answer({"pushed": False, "faults": faults}, lambda page: _show_faults(page, faults))
        return 1
    return _answer_pushed(out, pushed)


def _show_faults(page: Page, faults: list[str]) -> None:
    from interlock.cli.render import BAD

    page.table([(BAD, fault) for fault in faults])
    page.line("nothing was changed")


def _answer_pushed(out: Output, pushed: SharedConfig) -> int:
    out.answer(
        {"pushed": True, **_document(pushed)},
        lambda page: _show_version(page, pushed, "in force on all machines that follow it"),
    )
    return 0


@config.command(short_help="Write the shared configuration to a directory.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--version", type=click.IntRange(1), help="An earlier version.")
@looking
async def pull(app: Interlock, out: Output, /, directory: Path, version: int | None) -> int:
    """Write the shared configuration to DIRECTORY, to look at it or to change it. It must not have such files.

    \b
    interlock config pull new
    """
    from interlock.api.files import keep
    from interlock.api.shared_config import SharedConfiguration
    from interlock.core.errors import Failure

    shared = SharedConfiguration(app)
    found = await shared.newest() if version is None else await shared.get(version)
    if found is None:
        raise Failure("E3411", "nothing was pushed to the store yet", resolution="interlock config push")
    there = [name for name in found.files if (directory / name).exists()]
    if there:
        raise Failure("E3411", f"{directory} has {', '.join(there)} already", resolution="name another directory")
    for name, text in found.files.items():
        keep(directory / name, text.encode())
    out.answer(
        {"directory": str(directory), **_document(found)},
        lambda page: _show_version(page, found, f"written to {directory}"),
    )
    return 0


@config.command(short_help="The last 50 versions of the shared configuration.")
@looking
async def history(app: Interlock, out: Output, /) -> int:
    """The last 50 versions of the shared configuration, the newest first.

    \b
    interlock config history
    """
    from interlock.api.shared_config import SharedConfiguration

    rows = await SharedConfiguration(app).history()

    def show_rows(page: Page) -> None:
        cells = [(str(row["version"]), str(row["at"]), str(row["by"])) for row in rows]
        page.table(cells, ("version", "at", "by") if rows else ())
        if not rows:
            page.line("nothing was pushed yet: interlock config push")

    out.answer({"versions": rows}, show_rows)
    return 0


@config.command(short_help="Put an earlier shared version in force again.")
@click.argument("version", type=click.IntRange(1))
@over_home
async def rollback(app: Interlock, out: Output, /, version: int) -> int:
    """Put an earlier VERSION in force again, as a new one. It is checked as a push is. Needs policy:admin.

    \b
    interlock config rollback 3
    """
    from interlock.api.shared_config import SharedConfiguration

    return _answer_pushed(out, await SharedConfiguration(app).rollback(version, by=app.caller))
