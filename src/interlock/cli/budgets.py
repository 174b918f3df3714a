"""`interlock budgets`: what calls may still cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_rest, at_server, looking
from interlock.cli.output import Output
from interlock.cli.viewer import AtRest, Local, Remote, Viewer, with_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


async def _at_server(server: Server, out: Output, /) -> int:
    viewer = await Remote.of(server)
    # Auditors see everybody's, as the owner of a data directory does; others their own.
    every = "audit:read" in await server.scopes()
    document = await server.get("/v1/budgets", all="true" if every else None)
    return _answer(out, viewer, document["budgets"])


def _at_rest(reader: Reader, out: Output, /) -> int:
    from interlock.api.homes import home_at

    home = home_at(out.session.path)
    viewer = AtRest(reader, home.path)
    if not home.settings.exists() and not {"INTERLOCK_BUDGETS", "INTERLOCK_SHARED_CONFIG"} & os.environ.keys():
        return _answer(out, viewer, [])  # no budget is set unless somebody sets one
    from interlock.api.budgets import shown
    from interlock.api.homes import settings_of

    return _answer(out, viewer, shown(reader, settings_of(home).settings.budgets, lambda _: (), viewer.now_ms()))


@click.command(short_help="What is spent, reserved and left of each budget.")
@at_server(_at_server)
@at_rest(_at_rest)
@looking
async def budgets(app: Interlock, out: Output, /) -> int:
    """The amount spent, reserved and left of each budget, and when its period ends.

    Budgets are set in settings.toml. For each, the callers who have used the most are listed. With --server: your own,
    or with the scope audit:read everybody's.

    \b
    interlock budgets
    """
    from interlock.api.budgets import overview

    return _answer(out, await Local.of(app), overview(app, lambda _: ()))


def _answer(out: Output, viewer: Viewer, documents: list[Json]) -> int:
    def show(page: Page) -> None:
        if documents:
            rows = [row for one in documents for row in _rows(viewer, one)]
            page.table(rows, ("budget", "for", "spent", "set aside", "left", "ends"))
        else:
            page.line("no budgets; settings.toml in the data directory sets them, under [[budgets]]")

    out.answer({"budgets": documents}, show)
    return 0


def _rows(viewer: Viewer, budget: Json) -> Iterator[tuple[str, ...]]:
    """A line for each of those a budget is for; or one for all, of whom none has used any of it."""
    from interlock.cli.render import clock_time, local
    from interlock.core.formatting import quantity, span

    ends = ""
    if budget["ends_at"] is not None and (at := local(budget["ends_at"])) is not None:
        ends = f"{clock_time(budget['ends_at'])} (in {span(at.timestamp() * 1000 - viewer.now_ms())})"
    nobody = "each" if budget["per"] == "call" else "nobody yet"
    unused: Json = {"spent": 0.0, "held": 0.0, "left": budget["limit"]}
    for use in budget["used"] or [unused]:
        names = [with_names(viewer, use[name]) for name in ("tenant", "caller", "session", "task") if use.get(name)]
        amounts = (quantity(use[name]) for name in ("spent", "held", "left"))
        yield budget["budget"], ", ".join(names) or nobody, *amounts, ends
