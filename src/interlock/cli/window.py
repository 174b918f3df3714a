"""`interlock tools cost`, `affordances` and `schema`: tools in the context window of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import acting, as_holder, at_server, over_home
from interlock.cli.completion import tool_names
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


async def _cost_at_server(server: Server, out: Output, /) -> int:
    return _answer_cost(out, await server.get("/v1/tools/cost"))


@click.command(short_help="Tokens that tools take in a model's context window.")
@at_server(_cost_at_server)
@as_holder
@over_home
async def cost(app: Interlock, out: Output, /, token: str | None) -> int:
    """Tokens that tools take in a model's context window: as an index, and with their full schemas.

    The setting `counter` says how tokens are counted.

    \b
    interlock tools cost
    interlock tools cost --json
    """
    return _answer_cost(out, await app.token_costs(caller=await acting(app, token)))


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


async def _affordances_at_server(server: Server, out: Output, /, words: tuple[str, ...], budget: int) -> int:
    return _answer_affordances(out, await server.get("/v1/tools/affordances", budget=budget, q=" ".join(words)))


@click.command(short_help="The text that offers tools to a model, within a budget.")
@at_server(_affordances_at_server)
@click.argument("words", nargs=-1)
@click.option("--budget", type=click.IntRange(0, 100_000_000), required=True, help="How many tokens at most.")
@as_holder
@over_home
async def affordances(app: Interlock, out: Output, /, words: tuple[str, ...], budget: int, token: str | None) -> int:
    """The text that offers tools to a model within a budget: a line for each, and the most useful schemas.

    WORDS say what the tools are for. Without them, those that you called most come first.

    \b
    interlock tools affordances --budget 2000 balance
    interlock tools affordances --budget 500 --json
    """
    found = await app.affordances(budget=budget, query=" ".join(words), caller=await acting(app, token))
    return _answer_affordances(out, found.document())


def _answer_affordances(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        click.echo(document["text"], nl=False)
        loaded, named = len(document["loaded"]), len(document["signatures"])
        words = f"{document['tokens']:,} of {document['budget']:,} tokens: index of {document['index']},"
        out.page(error=True).line(f"{words} {loaded:,} schemas, {named:,} signatures")

    out.answer(document, show)
    return 0


async def _schema_at_server(server: Server, out: Output, /, tool: str, pointer: str) -> int:
    from interlock.cli.remote import part

    return _answer_schema(out, await server.get(f"/v1/tools/{part(tool)}/schema", at=pointer))


@click.command(short_help="The input schema of a tool, or a part of it.")
@at_server(_schema_at_server)
@click.argument("tool", shell_complete=tool_names)
@click.argument("pointer", default="")
@as_holder
@over_home
async def schema(app: Interlock, out: Output, /, tool: str, pointer: str, token: str | None) -> int:
    """The input schema of a tool, or the part of it at a JSON pointer.

    Large schemas are offered to models without their nested parts; `x-detail` says where each one is.

    \b
    interlock tools schema demo.post
    interlock tools schema shop.order /properties/address
    """
    return _answer_schema(out, await app.schema_part(tool, pointer, caller=await acting(app, token)))


def _answer_schema(out: Output, document: Json) -> int:
    return out.answer_indented(document, document["schema"])
