"""`interlock calls reconcile`: the calls whose outcome nobody knows, and a person's word on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import at_server, over_home
from interlock.cli.output import Output
from interlock.cli.values import NOT_GIVEN, json_value

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page

Json = dict[str, Any]


async def _reconcile_at_server(server: Server, out: Output, /, call_id: str | None, **given: Any) -> int:
    from interlock.cli.remote import part

    _check(call_id, **given)
    waiting: list[Json] = (await server.get("/v1/calls/unknown"))["unknown"]
    if call_id is None:
        return _answer_list(out, waiting)
    result = {} if given["result"] is NOT_GIVEN else {"result": given["result"]}
    path = f"/v1/calls/{part(_one_of(waiting, call_id))}/settle"
    return _answer_settled(out, (await server.post(path, {"happened": given["happened"], **result}))["settled"])


@click.command(short_help="List or settle calls whose outcome is unknown.")
@at_server(_reconcile_at_server)
@click.argument("call_id", metavar="[ID]", required=False)
@click.option("--happened", is_flag=True, help="It took effect: answer its key with this result from now on.")
@click.option("--did-not-happen", is_flag=True, help="It took no effect: free its key, so that it may run again.")
@click.option(
    "--result", metavar="JSON", callback=json_value, help="What it returned, with --happened. Nothing by default."
)
@over_home
async def reconcile(app: Interlock, out: Output, /, call_id: str | None, **given: Any) -> int:
    """List the calls whose outcome nobody can know, or settle one of them after looking at the world.

    A process that died in the middle of a write leaves its call here. Its key stays blocked, and nothing is retried,
    until a person says whether it happened. Who settled what is on record.

    \b
    interlock calls reconcile
    interlock calls reconcile 01JCXK2M4Q8Z… --happened --result '{"entry": 91}'
    interlock calls reconcile 01JCXK2M4Q8Z… --did-not-happen
    """
    from interlock.api.reconciliation import Reconciliation

    _check(call_id, **given)
    calls = Reconciliation(app)
    waiting = await calls.unknown(by=app.caller)
    if call_id is None:
        return _answer_list(out, waiting)
    stated = given["result"] is not NOT_GIVEN
    result = given["result"] if stated else None
    exact = _one_of(waiting, call_id)
    settled = await calls.settle(exact, by=app.caller, happened=given["happened"], result=result, stated=stated)
    return _answer_settled(out, settled)


def _check(call_id: str | None, *, happened: bool, did_not_happen: bool, result: Any) -> None:
    """Refuse options that do not go together, before anything is opened or asked."""
    if call_id is None:
        if happened or did_not_happen or result is not NOT_GIVEN:
            raise click.UsageError("say which call: interlock calls reconcile ID --happened | --did-not-happen")
        return
    if happened == did_not_happen:
        raise click.UsageError("say one of --happened and --did-not-happen")
    if result is not NOT_GIVEN and not happened:
        raise click.UsageError("--result goes with --happened")


def _one_of(waiting: list[Json], call_id: str) -> str:
    """The one of these calls whose id is this, or begins so."""
    from interlock.api.history import SHORTEST, too_short
    from interlock.core.errors import Failure

    ids = [str(one["invocation_id"]) for one in waiting]
    if call_id in ids:
        return call_id
    prefix = call_id.rstrip("….").upper()
    if len(prefix) < SHORTEST:
        raise too_short(call_id)
    found = [one for one in ids if one.startswith(prefix)]
    if len(found) != 1:
        raise Failure("E3702", f"no one call `{call_id}` waits to be settled; see interlock calls reconcile")
    return found[0]


def _answer_settled(out: Output, settled: Json) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        happened = "it happened; its idempotency key answers with this result"
        word = happened if settled["happened"] else "it did not happen; its key is free"
        page.line(GOOD, f" {settled['tool']}@{settled['version']}   settled by {settled['by']}: {word}")

    out.answer({"settled": settled}, show)
    return 0


def _answer_list(out: Output, waiting: list[Json]) -> int:
    out.answer({"unknown": waiting}, lambda page: _show_unknown(page, waiting))
    return 0


def _show_unknown(page: Page, waiting: list[Json]) -> None:
    from interlock.cli.render import Text, clock_time

    if not waiting:
        page.line("nothing to settle: the outcome of every call is known")
        return
    rows: list[list[Cell]] = [
        [
            clock_time(str(one["at"])),
            Text(str(one["invocation_id"]), "bold"),
            f"{one['tool']}@{one['version']}",
            str(one["key"]),
            str(one["caller"]),
        ]
        for one in waiting
    ]
    page.table(rows, ("when", "call", "tool", "idempotency key", "caller"))
    page.line("look whether it took effect, then: interlock calls reconcile ID --happened | --did-not-happen")
