"""The arguments that a shell completes after Tab, besides commands and options."""

from __future__ import annotations

import click

from interlock.cli.command import reader_of
from interlock.cli.output import Session


def tool_names(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
    """The tools of the data directory whose names begin so, for the completion of a shell. At a server, none."""
    from interlock.api.homes import tool_addresses
    from interlock.core.errors import Failure

    given = context.find_root().params
    if given.get("server"):
        return []
    try:
        with reader_of(Session(home=given.get("home"), verbose=False)) as reader:
            return [] if reader is None else [one for one in tool_addresses(reader) if one.startswith(begun)]
    except Failure:
        return []  # a command that is run says what is wrong
