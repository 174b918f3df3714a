"""`interlock tools select`: the tool for a request, and how it was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, acting, as_holder, over_home

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.render import Page

Json = dict[str, Any]
_ANSWERS = {"ALLOW": "allowed", "REQUIRE_APPROVAL": "needs approval", "DENY": "denied"}


@click.command()
@click.argument("words", nargs=-1, required=True)
@click.option("--allocation", type=click.IntRange(0), help="How many tokens the schemas may take together.")
@click.option("--cheaper", is_flag=True, help="Of tools with equal expected success, choose the cheaper one.")
@click.option("--session", default="", help="The session whose budgets count.")
@as_holder
@over_home
async def select(
    lock: Interlock,
    out: Output,
    /,
    words: tuple[str, ...],
    allocation: int | None,
    cheaper: bool,
    session: str,
    token: str | None,
) -> int:
    """Choose a tool for a request, and say how: what each stage left, and whether you may call it.

    No call is made. The selection is on record; its text is stored encrypted unless selection_requests is never.

    \b
    interlock tools select "how much is in the cash account"
    interlock tools select "post 250 to cash" --json
    """
    made = await lock.select(
        " ".join(words),
        caller=await acting(lock, token),
        allocation=allocation,
        cheaper=cheaper,
        session=session,
        door="cli",
    )
    return _answer(out, made.document())


def _answer(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        for one in document["stages"]:
            page.line(f"{one['stage']:<11} {one['before']:>6,} → {one['after']:<6,} {one['why']}")
        page.line("")
        rows = [[one["tool"], f"{one['score']:.2f}", f"{one['tokens']:,}"] for one in document["candidates"]]
        if rows:
            page.table(rows, ("candidate", "score", "tokens"))
        gate: Json | None = document["gate"]
        if gate is None:
            page.line(document["refused"] or "no tool fits; see them all: interlock tools list")
            return
        wait = "" if gate["timeout_s"] is None else f", within {gate['timeout_s']:,} s"
        page.line(f"chosen: {document['chosen']}   {_ANSWERS[gate['answer']]}{wait}: {gate['reason']}")

    out.answer(document, show)
    return 0
