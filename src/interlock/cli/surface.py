"""`interlock surface`: what callers are offered of the catalog, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import acting, as_holder, at_server, over_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.group(short_help="What callers are offered of the catalog, and why.")
def surface() -> None:
    """Show which tools of the catalog callers are offered: loaded, deferred or blocked, and why."""


async def _show_at_server(server: Server, out: Output, /, caller: str | None) -> int:
    return _answer(out, await server.get("/v1/surface", caller=caller))


@surface.command()
@at_server(_show_at_server)
@click.option("--caller", metavar="NAME", help="A registered name or an id; you, if left out.")
@as_holder
@over_home
async def show(app: Interlock, out: Output, /, caller: str | None, token: str | None) -> int:
    """The tools that a caller is offered, each with the reason. Those of another caller need the scope tools:admin.

    \b
    interlock surface show
    interlock surface show --caller research-7 --json
    """
    from interlock.api.surface_view import SurfaceViews

    views = SurfaceViews(app, app.tools)
    return _answer(out, await views.show(by=await acting(app, token), who=caller))


def _answer(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        shown: Json = document["surface"]
        who = f"{document['agent']} for {document['caller']}" if document["agent"] else document["caller"]
        page.line(f"{who} (tenant {document['tenant']}), revision {document['revision']}: {shown['surface_reason']}")
        rows = [(name, "loaded", document["reasons"][name], "") for name in shown.get("loaded_tools", ())]
        rows += [(one["tool_id"], "deferred", "deferred", "") for one in shown.get("deferred_tools", ())]
        for kind in ("blocked", "excluded"):
            listed: list[Json] = shown.get(f"{kind}_tools", [])
            rows += [(one["tool_id"], kind, one["reason"], one.get("detail") or "") for one in listed]
        if rows:
            page.table(rows, ("tool", "state", "reason", "more"))
        else:
            page.line("no tools")
        if document["cursor"] is not None:
            page.line(f"more tools behind {document['cursor']}: REST `GET /v1/surface?cursor=…` has them all")

    out.answer(document, show)
    return 0
