"""`interlock budgets`: what calls may still cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, looking, with_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock.api.interlock import Interlock
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.command()
@looking
async def budgets(lock: Interlock, out: Output, /) -> int:
    """What is spent of each budget, what is set aside for calls that run, what is left, and when it starts over.

    Budgets are set in settings.toml of the home. Of each, those are shown who have used the most.

    \b
    interlock budgets
    """
    from interlock.api.budgets import overview

    documents = overview(lock, lambda _: ())

    def show(page: Page) -> None:
        if documents:
            rows = [row for one in documents for row in _rows(lock, one)]
            page.table(rows, ("budget", "for", "spent", "set aside", "left", "ends"))
        else:
            page.line("no budgets; settings.toml in the home sets them, under [[budgets]]")

    out.answer({"budgets": documents}, show)
    return 0


def _rows(lock: Interlock, budget: Json) -> Iterator[tuple[str, ...]]:
    """A line for each of those a budget is for; or one for all, of whom none has used any of it."""
    from interlock.cli.render import clock_time, local
    from interlock.core.formatting import quantity, span

    ends = ""
    if budget["ends_at"] is not None and (at := local(budget["ends_at"])) is not None:
        ends = f"{clock_time(budget['ends_at'])} (in {span(at.timestamp() * 1000 - lock.clock.now_ms())})"
    nobody = "each" if budget["per"] == "call" else "nobody yet"
    unused: Json = {"spent": 0.0, "held": 0.0, "left": budget["limit"]}
    for use in budget["used"] or [unused]:
        names = [with_names(lock, use[name]) for name in ("tenant", "caller", "session", "task") if use.get(name)]
        amounts = (quantity(use[name]) for name in ("spent", "held", "left"))
        yield budget["budget"], ", ".join(names) or nobody, *amounts, ends
