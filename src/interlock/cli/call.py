"""`interlock call` makes a call, here or on a server, and shows its result; `interlock calls follow` waits for one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import acting, as_holder, at_server, over_home
from interlock.cli.completion import tool_names
from interlock.cli.environment import clear_credentials
from interlock.cli.over_call import TargetCall, over_call
from interlock.cli.result_json import result_json
from interlock.cli.values import json_value
from interlock.cli.viewer import Local, Remote, Viewer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.api.interlock import Interlock
    from interlock.api.types import Ticket
    from interlock.call.phases import Request
    from interlock.call.results import Result
    from interlock.cli.output import Output
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page

Json = dict[str, Any]


def _seconds(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter("must be a number of seconds above 0")
    return value


def _patience(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise click.BadParameter("must be a number of seconds above 0")
    return value


def _name(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.partition("@")[0].strip():
        raise click.BadParameter("name a tool; interlock tools list shows them")
    if value.endswith("@"):
        raise click.BadParameter(f"say which versions after the @, or write {value[:-1]} alone")
    return value


async def _call_at_server(
    server: Server,
    out: Output,
    /,
    tool: str,
    arguments: Any,
    wait_s: float | None,
    timeout_s: float | None,
    background: bool,
    tokens: int | None,
    **given: Any,
) -> int:
    if background and tokens is not None:
        raise click.UsageError("--background prints no result; read parts of it later: interlock calls part ID")
    if background and wait_s is not None:
        raise click.UsageError("--background does not wait; follow the call: interlock calls follow ID")
    name, _, spec = tool.partition("@")
    fields: Json = {
        "tool_id": name,
        "tool_version": spec or None,
        "parameters": arguments,
        "idempotency_key": given["key"],
        "session_id": given["session"] or None,
        "timeout_ms": None if timeout_s is None else max(1, round(timeout_s * 1000)),
        "dry_run": given["dry_run"] or None,
        "task": given["task"],
        "execution_mode": "async" if background else None,
    }
    body = {name: value for name, value in fields.items() if value is not None}
    if background:
        answer = await server.post("/v1/tools/invoke", body)
        out.answer(answer, lambda page: page.line(answer["invocation_id"]))
        return 0
    with out.working(f"{name} runs at {server.url} …"):
        result = await send(server, "/v1/tools/invoke", body, out.report if out.shows_progress else None)
    if result.pending and wait_s is not None:
        result = await _wait_at_server(server, out, body, result, wait_s)
    if tokens is not None and not result.pending:
        from interlock.cli.context_block import answer_from_server

        return await answer_from_server(server, out, result, tokens)
    return await answer_from(server, out, result)


async def send(server: Server, path: str, body: Json, report: Callable[[Json], None] | None = None) -> Result:
    """The result of a call that a server makes or continues. `report` hears of its progress meanwhile."""
    from interlock.cli.remote import CALL_TIMEOUT_S
    from interlock.cli.restored import result_of

    if report is not None:
        return result_of(*await server.observe(path, body, report, timeout_s=CALL_TIMEOUT_S))
    return result_of(*await server.answer("POST", path, body, timeout_s=CALL_TIMEOUT_S))


async def _wait_at_server(server: Server, out: Output, body: Json, pending: Result, wait_s: float) -> Result:
    """The same as `_wait`, by asking the server now and then."""
    import asyncio
    import time
    from dataclasses import replace

    from interlock.cli.tickets import show_waiting, ticket_at
    from interlock.core.errors import Failure

    ticket_id = pending.metadata["pending"]["ticketId"]
    page, ticket = out.page(error=True), await ticket_at(server, ticket_id)
    show_waiting(await Remote.of(server), page, ticket)
    give_up, asked = time.monotonic() + wait_s, ticket.step
    while ticket.state == "PENDING" and (left_s := give_up - time.monotonic()) > 0:
        await asyncio.sleep(min(1.0, left_s))
        ticket = await ticket_at(server, ticket_id)
        if ticket.step > asked:
            page.line(f"  nobody has decided yet; {ticket.chain[ticket.step].group} were asked too")
            asked = ticket.step
    if ticket.state == "PENDING":
        return pending
    if ticket.state == "APPROVED":
        return await send(server, f"/v1/tools/resume/{ticket.call}", {})
    if (failure := ticket.rejection()) is not None:
        metadata = {**pending.metadata, "approval": ticket.outcome()}
        return replace(pending, state="denied", error=failure, metadata=metadata)
    # The server has continued it; under its key the call is answered with its result.
    if "idempotency_key" not in body:
        raise Failure("E3410", f"another process went on with it; see interlock calls show {ticket.call}")
    return await send(server, "/v1/tools/invoke", body)


async def answer_from(server: Server, out: Output, result: Result) -> int:
    """Show a result that a server gave."""
    if not result.pending:
        return _answer_result(out, result)
    from interlock.cli.tickets import ticket_at

    ticket = await ticket_at(server, result.metadata["pending"]["ticketId"])
    return _answer_pending(out, await Remote.of(server), result, ticket)


@click.command()
@at_server(_call_at_server)
@click.argument("tool", metavar="TOOL[@RANGE]", callback=_name, shell_complete=tool_names)
@click.argument("arguments", metavar="['JSON' | -]", default="{}", callback=json_value)
@click.option("--key", help="Your own key for this action; sent twice, it runs once. Writes need one.")
@click.option("--session", default="", help="The session whose state the tool sees.")
@click.option("--task", help="The task that the call's cost is counted for.")
@click.option("--dry-run", is_flag=True, help="Say what would happen, and do nothing.")
@click.option("--timeout", "timeout_s", type=float, callback=_seconds, metavar="S", help="Seconds to allow.")
@click.option(
    "--wait",
    "wait_s",
    type=float,
    is_flag=False,
    flag_value=math.inf,
    callback=_patience,
    metavar="[S]",
    help="If a person must agree, wait for it, so many seconds or until it is decided, and go on.",
)
@click.option(
    "--background", is_flag=True, help="Let a server (--server) go on with the call, and print its id at once."
)
@click.option(
    "--tokens", type=click.IntRange(1), metavar="N", help="Print it as a model gets it, within so many tokens."
)
@as_holder
@over_home
async def call(
    app: Interlock,
    out: Output,
    /,
    tool: str,
    arguments: Any,
    wait_s: float | None,
    background: bool,
    tokens: int | None,
    token: str | None,
    **given: Any,
) -> int:
    """Call a tool through all six phases. Arguments are one JSON object, or - to read it from stdin.

    Exits 0 when the tool succeeded, 1 when it failed, was refused or waits for a person, 2 when the command itself
    makes no sense. With --json, the value is in `structured_content`, or stored under the `persisted_ref` in
    `content`; what went wrong is in `error`, the ticket of a call that waits in `pending`.

    \b
    interlock call demo.balance '{"account": "cash"}'
    interlock call demo.post@^1 '{"account": "cash", "cents": 250}' --key order-17
    interlock call demo.mail_statement '{"account": "cash", "to": "a@example.org"}' --key m-1 --wait
    echo '{"account": "cash"}' | interlock call demo.balance - --json
    interlock --server URL call demo.balance '{"account": "cash"}' --background
    """
    from interlock.call.phases import Request
    from interlock.core.errors import Failure

    if background:
        raise click.UsageError("--background needs a server that goes on with the call: name it with --server")
    name, _, spec = tool.partition("@")
    try:
        caller = await acting(app, token)
    except Failure as failure:
        # Refused like any call: as a result, and on record.
        refused = Request(tool=name, arguments={}, caller=None, door="cli")
        return await answer(app, out, await app.decline(refused, failure))
    if app.settings.surface_excluded:
        caller = app.tools.exclusions.applied(caller)
    request = Request(
        tool=name,
        version=spec or None,
        arguments=arguments,  # whatever it is: the gateway judges it, and the refusal is on record
        caller=caller,
        door="cli",
        on_progress=out.report if out.shows_progress else None,
        **given,
    )
    clear_credentials(app.settings)
    with out.working(""):
        result = await app.make(request)
    if result.pending and wait_s is not None:
        result = await _wait(app, out, request, result, wait_s)
    if result.error is not None and result.error.code == "E3101" and token is None:
        result = await _with_offers(app, result, name)
    if tokens is not None and not result.pending:
        from interlock.cli.context_block import answer_block

        return await answer_block(app, out, result, tokens)
    return await answer(app, out, result)


async def _with_offers(app: Interlock, result: Result, name: str) -> Result:
    """The refusal of a name, with the tools of upstreams that have it and were not admitted."""
    from dataclasses import replace

    from interlock.core.errors import Failure

    assert result.error is not None
    for upstream in await app.upstreams.list():
        for one in await app.upstreams.offers(upstream.name):
            names = (one.name, one.address, f"{upstream.name}.{one.name}")
            if one.state != "admitted" and name in names:
                reason = one.reason or one.why
                words = f"{result.error.in_full}; the upstream {upstream.name} offers {one.name}, which is {one.state}"
                error = Failure(
                    result.error.code,
                    f"{words}: {reason}" if reason else words,
                    details=result.error.details,
                    resolution=f"see interlock upstream show {upstream.name}",
                )
                return replace(result, error=error)
    return result


async def _wait(app: Interlock, out: Output, request: Request, pending: Result, wait_s: float) -> Result:
    """Wait for a person and go on once they agreed; meanwhile tell, apart from the answer, who was asked."""
    from interlock.cli.tickets import show_waiting
    from interlock.core.errors import Failure

    page = out.page(error=True)
    ticket = await app.approvals.show(pending.metadata["pending"]["ticketId"])
    show_waiting(await Local.of(app), page, ticket)
    give_up, asked = app.clock.monotonic() + wait_s, ticket.step
    while pending.pending and (left_s := give_up - app.clock.monotonic()) > 0:
        pending = await app.wait(pending, within_s=min(1.0, left_s))
        ticket = await app.approvals.show(ticket.id)
        if ticket.step > asked:
            page.line(f"  nobody has decided yet; {ticket.chain[ticket.step].group} were asked too")
            asked = ticket.step
        if pending.pending and ticket.state not in ("PENDING", "APPROVED"):
            # Another process has gone on with it; under its key the call is answered with what came of that.
            if request.key is None:
                raise Failure("E3410", f"another process went on with it; see interlock calls show {ticket.call}")
            pending = await app.make(request)
    return pending


async def answer(app: Interlock, out: Output, result: Result) -> int:
    """Show a result. People who were asked to approve are notified before this process ends."""
    if result.pending:
        ticket = await app.approvals.show(result.metadata["pending"]["ticketId"])
        code = _answer_pending(out, await Local.of(app), result, ticket)
    else:
        code = _answer_result(out, result)
    if result.error is not None and result.error.code == "E3208":
        await app.courier.deliver_due()
    return code


def _answer_pending(out: Output, viewer: Viewer, result: Result, ticket: Ticket) -> int:
    from interlock.cli.tickets import show_waiting

    def show(page: Page) -> None:
        show_waiting(viewer, page, ticket)
        page.hook_outputs(result)

    out.answer(result_json(result), show)
    return 1


def _answer_result(out: Output, result: Result) -> int:
    out.answer(result_json(result), lambda page: page.result(result))
    return 0 if result.ok else 1


def answer_resumed(out: Output, results: list[Result]) -> int:
    """Show the results of all calls that went on."""

    def show(page: Page) -> None:
        for result in results:
            page.result(result)
        if not results:
            page.line("nothing to go on with: no approved call waits")

    out.answer({"resumed": [result_json(result) for result in results]}, show)
    return 0 if all(result.ok for result in results) else 1


# Calls in the background

_POLL_S = 0.5


def part(text: str) -> str:
    """Quote a text as a part of a path."""
    from interlock.cli import remote

    return remote.part(text)


def answer_status(out: Output, status: Json) -> int:
    """The state of a call, for a caller who may not read the journal."""
    tool = "@".join(str(status[name]) for name in ("tool_id", "version") if status.get(name))

    def show(page: Page) -> None:
        from interlock.cli.render import Text

        page.line(Text(status["invocation_id"], "bold"), f"   {tool}   {status['state']}".rstrip())
        error: Json = status.get("error") or {}
        code = status.get("error_code") or error.get("error_code")
        rows: list[tuple[str, Cell]] = [
            (name, str(status[field]))
            for name, field in (("ticket", "approval_ticket_id"), ("took ms", "latency_ms"), ("trace", "trace_id"))
            if status.get(field)
        ]
        page.facts([*rows, *([("error", str(code))] if code else [])])

    out.answer(status, show)
    return 0


async def _until_ended(out: Output, status: Callable[[], Awaitable[Json]]) -> int:
    """Ask until a call has ended or waits for a person. Exits 0 where it succeeded."""
    import asyncio

    while True:
        document = await status()
        state = document.get("state", document["status"])
        if state != "running":
            break
        await asyncio.sleep(_POLL_S)
    answer_status(out, {**document, "state": state})
    return 0 if state == "succeeded" else 1


async def _follow_at_server(server: Server, out: Output, /, call_id: str) -> int:
    from interlock.core.errors import Failure

    path = f"/v1/calls/{part(call_id)}"
    try:
        async for event in server.events(f"{path}/events"):
            if event["event_class"] == "tool.invocation.progress":
                out.report(event.get("data") or event)
    except Failure as failure:
        if failure.code != "E3502":
            raise
        # The connection broke, and the call may go on all the same.
    out.progress("")
    return await _until_ended(out, lambda: server.get(path))


@click.command(short_help="Wait until a call has ended or waits for a person.")
@at_server(_follow_at_server)
@click.argument("call_id", metavar="ID")
@over_call
async def follow(app: Interlock, out: Output, target: TargetCall, /) -> int:
    """Wait until a call has ended or waits for a person, and show how it stands.

    With --server, progress that its tool reports is shown on a terminal meanwhile. Exits 0 when it succeeded, 1 when it
    did not or waits for a person.

    \b
    interlock calls follow 01JCXK2M4Q8Z…
    interlock --server URL calls follow 01JCXK2M4Q8Z…
    """
    from interlock.api.service import Service

    service = Service(app)
    return await _until_ended(out, lambda: service.calls.find(target.call, target.caller))
