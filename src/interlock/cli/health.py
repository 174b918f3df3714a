"""`interlock health`: whether calls can be served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_server, looking
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


async def _at_server(server: Server, out: Output, /) -> int:
    _, document = await server.answer("GET", "/ready", with_token=False)
    return _answer(out, document)


@click.command()
@at_server(_at_server)
@looking
async def health(app: Interlock, out: Output, /) -> int:
    """Whether calls can be served, dependency by dependency. Exits 1 where they cannot. A server needs no token for it.

    \b
    interlock health
    interlock --server http://127.0.0.1:8080 health
    """
    from interlock.api.health import Health

    _, document = await Health(app).readiness(names=True)
    return _answer(out, document)


def _answer(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD, MAYBE

        marks = {"healthy": GOOD, "degraded": MAYBE}
        page.line(marks.get(document["status"], BAD), f" {document['status']}")
        page.table(
            [(marks.get(state, BAD), name, state) for name, state in document["dependencies"].items()], indent="  "
        )

    out.answer(document, show)
    return 1 if document["status"] == "down" else 0
