"""What the shell completes after Tab, besides commands and options."""

from __future__ import annotations

import click

from interlock.cli.command import Session, reader_of


def tool_names(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
    """The tools of the data directory whose names begin so, for the completion of a shell. At a server, none."""
    from interlock.core.errors import Failure
    from interlock.store.tools import addresses

    given = context.find_root().params
    if given.get("server"):
        return []
    try:
        with reader_of(Session(home=given.get("home"), verbose=False)) as reader:
            return [] if reader is None else sorted(filter(lambda one: one.startswith(begun), addresses(reader)))
    except Failure:
        return []  # a command that is run says what is wrong
