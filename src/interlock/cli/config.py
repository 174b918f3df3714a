"""`interlock config`: what the settings are and where they come from, whether they can be used, and who has others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, without_home

if TYPE_CHECKING:
    from interlock.cli.render import Page

Json = dict[str, Any]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def config() -> None:
    """The configuration: settings.toml and its overrides, the policy and the principals, on every machine of the store.

    \b
    interlock config show --changed
    interlock config check
    interlock config diff
    """


# show


@config.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--changed", is_flag=True, help="Only settings that are not at their default.")
@without_home
def show(out: Output, /, names: tuple[str, ...], changed: bool) -> int:
    """The settings in effect, or those named, and where each comes from. Credentials are masked.

    A setting comes from a variable of the environment, from settings.toml, or is the default. A server that was
    started with other variables, or before the file was changed, has other settings.

    \b
    interlock config show
    interlock config show store approval
    """
    from interlock.privacy.configured import masked
    from interlock.settings import Settings, effective_settings, nearest, variable
    from interlock.store.homes import home_at

    known = Settings.model_fields
    for name in names:
        if name not in known:
            meant = nearest(name, known)
            raise click.UsageError(f"there is no setting `{name}`" + (f"; did you mean `{meant}`?" if meant else ""))
    home = home_at(out.session.path)
    settings, sources = effective_settings(home.settings)
    rows = [
        {
            "name": name,
            "value": masked(getattr(settings, name)),
            "source": sources.get(name, "default"),
            "variable": variable(name),
        }
        for name in known
        if (not names or name in names) and (not changed or name in sources)
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

    out.answer({"home": str(home.path), "settings": rows}, show_rows)
    return 0


# check


@config.command()
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
    from interlock.cli.config_check import check_files
    from interlock.store.homes import home_at

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


@config.command()
@without_home
def diff(out: Output, /) -> int:
    """What each machine on the store runs, and where they differ: version, schema, policy, principals, settings, keys.

    Machines are compared by digests that their processes tell with their leases. A data directory without a running
    process tells nothing, except for this one. Exits 1 if something differs.

    \b
    interlock config diff
    interlock config diff --json
    """
    from interlock.store.homes import home_at
    from interlock.store.node_files import compare, nodes

    found = nodes(home_at(out.session.path))
    different = compare(found)

    def show_nodes(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD

        head = ("machine", "directory", "processes", "version", "schema")
        page.table(
            [
                (one.machine, one.directory, f"{one.processes:,}", _words(one.versions), _words(one.schemas))
                for one in found
            ],
            head,
        )
        if not different:
            page.line(GOOD, " all the same" if len(found) > 1 else " no other machine runs on this store")
        for what, groups in different.items():
            page.line(BAD, f" {what} differs")
            page.table([(f"    {value[:12] or '-'}", ", ".join(places)) for value, places in groups.items()])

    document = {"agree": not different, "nodes": [one._asdict() for one in found], "differences": different}
    out.answer(document, show_nodes)
    return 1 if different else 0


def _words(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "-"
