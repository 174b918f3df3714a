"""`interlock tools cost`: what tools take in the context window of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, acting, as_holder, at_server, over_home

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


async def _cost_at_server(server: Server, out: Output, /) -> int:
    return _answer_cost(out, await server.get("/v1/tools/cost"))


@click.command()
@at_server(_cost_at_server)
@as_holder
@over_home
async def cost(lock: Interlock, out: Output, /, token: str | None) -> int:
    """Tokens that tools take in a model's context window: as an index, and with their full schemas.

    The setting `counter` says how tokens are counted.

    \b
    interlock tools cost
    interlock tools cost --json
    """
    return _answer_cost(out, await lock.token_costs(caller=await acting(lock, token)))


def _answer_cost(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        if not document["of"]:
            page.line("no tools yet; add some: interlock tools add FILE.py")
            return
        largest = sorted(document["of"], key=lambda one: -one["full_tokens"])
        rows = [[one["tool"], f"{one['index_tokens']:,}", f"{one['full_tokens']:,}"] for one in largest]
        page.table(rows, ("tool", "index", "full schema"))
        page.line("")
        for name, words in (("index", "index"), ("full", "full schemas")):
            total, mean = document[f"{name}_tokens"], document[f"{name}_mean"]
            page.line(f"{words}: {document['tools']:,} x {mean:g} = {total:,} tokens ({document['counter']})")

    out.answer(document, show)
    return 0
