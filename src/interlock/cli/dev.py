"""`interlock dev FILE.py`: drafts of the tools of a file after every save. The session itself is in `dev_session`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import over_home, refuse_token
from interlock.cli.environment import clear_credentials
from interlock.cli.output import Output
from interlock.cli.values import parse_json

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock


def _calls(_: click.Context, __: click.Parameter, value: tuple[tuple[str, str], ...]) -> list[tuple[str, Any]]:
    """The calls of the command line, read before anything is opened."""
    return [(tool, parse_json(text, "--call")) for tool, text in value]


@click.command(short_help="Write tools with an answer after every save.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.py")
@click.option("--once", is_flag=True, help="Load the file once, make the calls of --call, and end. For scripts.")
@click.option(
    "--call",
    "wanted",
    nargs=2,
    multiple=True,
    metavar="TOOL JSON",
    callback=_calls,
    help="Call this tool with these arguments after every save. May be said several times.",
)
@click.option("--key", help="Your own key for calls of --call that change something. After a save, its draft is added.")
@click.option("--preview", is_flag=True, help="Only say what the calls of --call would do.")
@over_home
async def dev(
    app: Interlock,
    out: Output,
    /,
    file: Path,
    once: bool,
    wanted: list[tuple[str, Any]],
    key: str | None,
    preview: bool,
) -> int:
    """Write tools with an answer after every save: FILE.py is watched, and its tools become drafts.

    A draft of version 1.0.0 is 1.0.0-dev.1, then 1.0.0-dev.2 and so on. It passes admission with its contract tests,
    and its calls pass all six phases under your policy, on record like any other. Only this session can call a draft:
    to every other caller and process there is no such tool. Publish with `interlock tools add FILE.py`.

    Everything that is wrong with the file is listed at once, each with file, line and tool. What FILE.py imports from
    its own folder is watched too. At the prompt, the name of a tool asks for its arguments one by one; `help` lists
    the rest. After each call you see its result and its timeline.

    With --once the command ends after loading and the calls of --call; it exits 1 if a tool was refused or a call did
    not succeed.

    \b
    interlock dev stock.py
    interlock dev stock.py --call stock.count '{"item": "bolt"}'
    interlock dev stock.py --once --json
    interlock dev stock.py --once --call stock.put '{"item": "bolt", "pieces": 2}' --key try-1
    """
    from interlock.api.drafts import DraftSession
    from interlock.cli.dev_session import Workshop

    refuse_token("interlock dev")
    if file.suffix != ".py":
        raise click.UsageError(f"`{file.name}` is not a .py file; other tools are tried with interlock tools test")
    if out.as_json and not once:
        raise click.UsageError("--json needs --once: a session goes on until you end it")
    clear_credentials(app.settings)
    shop = Workshop(app, out, DraftSession(app, file), wanted, key, preview=preview)
    return await shop.once() if once else await shop.stay()
