"""`interlock calls reconcile`: the calls whose outcome nobody knows, and a person's word on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import NOT_GIVEN, Output, json_value, over_home

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.cli.render import Cell, Page
    from interlock.gateway.reconcile import UnknownCall


@click.command(short_help="List or settle calls whose outcome is unknown.")
@click.argument("call_id", metavar="[ID]", required=False)
@click.option("--happened", is_flag=True, help="It took effect: answer its key with this result from now on.")
@click.option("--did-not-happen", is_flag=True, help="It took no effect: free its key, so that it may run again.")
@click.option(
    "--result", metavar="JSON", callback=json_value, help="What it returned, with --happened. Nothing by default."
)
@over_home
async def reconcile(
    app: Interlock,
    out: Output,
    /,
    call_id: str | None,
    happened: bool,
    did_not_happen: bool,
    result: Any,
) -> int:
    """List the calls whose outcome nobody can know, or settle one of them after looking at the world.

    A process that died in the middle of a write leaves its call here. Its key stays blocked, and nothing is retried,
    until a person says whether it happened. Who settled what is on record.

    \b
    interlock calls reconcile
    interlock calls reconcile 01JCXK2M4Q8Z… --happened --result '{"entry": 91}'
    interlock calls reconcile 01JCXK2M4Q8Z… --did-not-happen
    """
    from interlock.gateway.reconcile import unknown_calls

    waiting = await unknown_calls(app.journal)
    if call_id is None:
        if happened or did_not_happen or result is not NOT_GIVEN:
            raise click.UsageError("say which call: interlock calls reconcile ID --happened | --did-not-happen")
        out.answer({"unknown": [one.document() for one in waiting]}, lambda page: _show_unknown(page, waiting))
        return 0
    if happened == did_not_happen:
        raise click.UsageError("say one of --happened and --did-not-happen")
    if result is not NOT_GIVEN and not happened:
        raise click.UsageError("--result goes with --happened")
    value = None if result is NOT_GIVEN else result
    return await _settle(
        app, out, _one_of(waiting, call_id), happened=happened, value=value, stated=result is not NOT_GIVEN
    )


def _one_of(waiting: list[UnknownCall], call_id: str) -> UnknownCall:
    from interlock.cli.history import SHORTEST, too_short
    from interlock.core.errors import Failure

    exact = [one for one in waiting if one.call == call_id]
    prefix = call_id.rstrip("….").upper()
    if not exact and len(prefix) < SHORTEST:
        raise too_short(call_id)
    found = exact or [one for one in waiting if one.call.startswith(prefix)]
    if len(found) != 1:
        raise Failure("E3702", f"no one call `{call_id}` waits to be settled; see interlock calls reconcile")
    return found[0]


async def _settle(app: Interlock, out: Output, one: UnknownCall, *, happened: bool, value: Any, stated: bool) -> int:
    from interlock.gateway.reconcile import reconcile as settle

    if happened:
        await _check_result(app, one, value, stated=stated)
    seal = app.storage.outcomes.seal
    await settle(app.journal, app.caller, one.call, seal=seal, happened=happened, value=value)
    document = {**one.document(), "happened": happened, "result": value, "by": app.caller.id}

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        word = "it happened; its key answers with this result" if happened else "it did not happen; its key is free"
        page.line(GOOD, f" {one.tool}@{one.version}   settled by {app.caller.id}: {word}")

    out.answer({"settled": document}, show)
    return 0


async def _check_result(app: Interlock, one: UnknownCall, value: Any, *, stated: bool) -> None:
    """The result will be replayed as the tool's own, so it must be one the tool could have given."""
    from interlock.cli.history import find
    from interlock.core.errors import Failure
    from interlock.data.explain import input_faults

    if not stated and (await find(app.journal, one.call)).facts.get("operation") == "compensate":
        return  # an undoing returns nothing
    try:
        schema = (await app.catalog.versions(one.tool))[one.version].contract.output
    except (KeyError, Failure):
        return  # the version is gone from the registry; the person's word stands
    faults = input_faults(schema, value, "field of the result")
    if faults and not stated:
        words = f"{one.tool}@{one.version} returns something; say what it was, as its key will answer with it"
        raise click.UsageError(f"{words}: --result JSON")
    if faults:
        listing = "; ".join(f"{fault.pointer.lstrip('/') or 'result'}: {fault.message}" for fault in faults[:5])
        raise Failure(
            "E3004",
            f"{one.tool}@{one.version} could not have returned that: {listing}",
            details={"faults": [fault.document() for fault in faults]},
            resolution=f"write the result as the tool would have given it: interlock tools show {one.tool}",
        )


def _show_unknown(page: Page, waiting: list[UnknownCall]) -> None:
    from interlock.cli.render import Text, clock_time

    if not waiting:
        page.line("nothing to settle: the outcome of every call is known")
        return
    rows: list[list[Cell]] = [
        [
            clock_time(str(one.document()["at"])),
            Text(one.call, "bold"),
            f"{one.tool}@{one.version}",
            one.key,
            one.caller,
        ]
        for one in waiting
    ]
    page.table(rows, ("when", "call", "tool", "key", "caller"))
    page.line("look whether it took effect, then: interlock calls reconcile ID --happened | --did-not-happen")
