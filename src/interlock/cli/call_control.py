"""Commands that act on one call: `interlock calls undo`, `cancel` and `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.call import answer, answer_from, answer_resumed, part, send
from interlock.cli.command import at_server, looking, refuse_token
from interlock.cli.output import Output
from interlock.cli.over_call import TargetCall, over_call
from interlock.cli.viewer import Remote

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.call.phases import Reason
    from interlock.call.results import Result
    from interlock.cli.remote import Server

Json = dict[str, Any]


async def _undo_at_server(server: Server, out: Output, /, call_id: str, key: str) -> int:
    path = f"/v1/calls/{part(call_id)}/undo"
    with out.working(f"{server.url} undoes {call_id} …"):
        result = await send(server, path, {"idempotency_key": key})
    return await answer_from(server, out, result)


@click.command()
@at_server(_undo_at_server)
@click.argument("call_id", metavar="ID")
@click.option("--key", required=True, help="Your own key for the undoing; sent twice, it runs once.")
@over_call
async def undo(app: Interlock, out: Output, target: TargetCall, /, key: str) -> int:
    """Run the compensation that a call stored when it succeeded. It is governed and recorded like any call.

    \b
    interlock calls undo 01JCXK2M4Q8Z… --key undo-order-17
    """
    with out.working(f"undoing {target.call} …"):
        report = out.report if out.shows_progress else None
        undone = await app.records.undo(target.call, by=target.caller, key=key, door="library", on_progress=report)
    return await answer(app, out, undone)


async def _cancel_at_server(server: Server, out: Output, /, call_id: str, reason: Reason) -> int:
    document = await server.ask("POST", f"/v1/calls/{part(call_id)}/cancel", query={"reason": reason})
    return _answer_cancel(out, document["invocation_id"], document["outcome"], reason)


@click.command(short_help="Ask for a call to end that runs, is queued or waits.")
@at_server(_cancel_at_server)
@click.argument("call_id", metavar="ID")
@click.option(
    "--reason",
    type=click.Choice(["interruption", "discard", "fallback", "sibling"]),
    default="interruption",
    help="Why: it labels the result. With discard, the result of a finished call is removed.",
)
@over_call
async def cancel(app: Interlock, out: Output, target: TargetCall, /, reason: Reason) -> int:
    """Ask for a call to end that runs, is queued or waits for a person, whichever process runs it.

    The answer is canceled, unsupported (its tool cannot be cancelled) or finished (it has ended).

    \b
    interlock calls cancel 01JCXK2M4Q8Z…
    interlock calls cancel 01JCXK2M4Q8Z… --reason discard
    """
    from interlock.api.service import Service

    outcome = await Service(app).calls.cancel(target.call, target.caller, reason)
    return _answer_cancel(out, target.call, outcome, reason)


def _answer_cancel(out: Output, call_id: str, answer: str, reason: Reason) -> int:
    words = {
        "canceled": "it was asked to end",
        "unsupported": "its tool cannot be cancelled; it runs to its end",
        "finished": "it has ended already" + ("; its result is removed" if reason == "discard" else ""),
    }
    out.answer(
        {"invocation_id": call_id, "outcome": answer},
        lambda page: page.line(f"{answer}   {call_id}   {words[answer]}"),
    )
    return 0 if answer == "canceled" else 1


async def _resume_at_server(server: Server, out: Output, /, ticket_id: str | None) -> int:
    if ticket_id is not None:
        found = await server.get(f"/v1/approvals/{part(ticket_id)}")
        (result,) = await _send_resumed(server, out, [found])
        return await answer_from(server, out, result)
    document = await server.get("/v1/approvals", all="true")
    holder = (await Remote.of(server)).holder
    waiting = [one for one in document["tickets"] if one["status"] == "APPROVED" and one["requestedBy"] == holder]
    return answer_resumed(out, await _send_resumed(server, out, waiting))


async def _send_resumed(server: Server, out: Output, approved: list[Json]) -> list[Result]:
    """The results of calls that a server goes on with, one after the other."""
    results: list[Result] = []
    for one in approved:
        with out.working(f"{one['toolId']} goes on at {server.url} …"):
            results.append(await send(server, f"/v1/tools/resume/{one['invocation_id']}", {}))
    return results


@click.command(short_help="Go on with calls that a person agreed to.")
@at_server(_resume_at_server)
@click.argument("ticket_id", metavar="[TICKET]", required=False)
@looking
async def resume(app: Interlock, out: Output, /, ticket_id: str | None) -> int:
    """Go on with a call that a person agreed to, or with all of them. Each is judged again, and runs once.

    \b
    interlock calls resume
    interlock calls resume apr_01JC…
    """
    refuse_token("going on with others' calls")
    report = out.report if out.shows_progress else None
    with out.working("going on with what was approved …"):
        if ticket_id is not None:
            results = [await app.approved_calls.resume(ticket_id, on_progress=report)]
        else:
            results = await app.approved_calls.resume_all(on_progress=report)
    return answer_resumed(out, results) if ticket_id is None else await answer(app, out, results[0])
