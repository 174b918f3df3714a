"""`interlock call` and `interlock calls`: make a call, go on with it, see what became of it, undo it, settle it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import (
    Output,
    acting,
    as_holder,
    held_token,
    json_value,
    looking,
    over_home,
    refuse_token,
    with_names,
)
from interlock.cli.environment import clear_credentials
from interlock.cli.payloads import payload
from interlock.cli.reconcile import reconcile

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.listing import Lead
    from interlock.call.phases import Reason, Request
    from interlock.call.results import Result
    from interlock.cli.history import History
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


@click.command()
@click.argument("tool", metavar="TOOL[@RANGE]", callback=_name)
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
@as_holder
@over_home
async def call(
    lock: Interlock,
    out: Output,
    /,
    tool: str,
    arguments: Any,
    wait_s: float | None,
    token: str | None,
    **given: Any,
) -> int:
    """Call a tool through all six phases. Arguments are one JSON object, or - to read it from stdin.

    Exits 0 when the tool succeeded, 1 when it failed, was refused or waits for a person, 2 when the command itself
    makes no sense.

    \b
    interlock call demo.balance '{"account": "cash"}'
    interlock call demo.post@^1 '{"account": "cash", "cents": 250}' --key order-17
    interlock call demo.mail_statement '{"account": "cash", "to": "a@example.org"}' --key m-1 --wait
    echo '{"account": "cash"}' | interlock call demo.balance - --json
    """
    from interlock.call.phases import Request
    from interlock.core.errors import Failure

    name, _, spec = tool.partition("@")
    try:
        caller = await acting(lock, token)
    except Failure as failure:
        # Refused like any call: as a result, and on record.
        refused = Request(tool=name, arguments={}, caller=None, door="cli")
        return await _answer(lock, out, await lock.gateway.decline(refused, failure))
    request = Request(
        tool=name,
        version=spec or None,
        arguments=arguments,  # whatever it is: the gateway judges it, and the refusal is on record
        caller=caller,
        door="cli",
        **given,
    )
    clear_credentials(lock.settings)
    result = await lock.gateway.invoke(request)
    if result.pending and wait_s is not None:
        result = await _wait(lock, out, request, result, wait_s)
    return await _answer(lock, out, result)


async def _wait(lock: Interlock, out: Output, request: Request, pending: Result, wait_s: float) -> Result:
    """Wait for a person and go on once they agreed; meanwhile tell, apart from the answer, who was asked."""
    from interlock.cli.tickets import show_waiting
    from interlock.core.errors import Failure

    page = out.page(error=True)
    ticket = await lock.approvals.show(pending.metadata["pending"]["ticketId"])
    show_waiting(lock, page, ticket)
    give_up, asked = lock.clock.monotonic() + wait_s, ticket.step
    while pending.pending and (left_s := give_up - lock.clock.monotonic()) > 0:
        pending = await lock.wait(pending, within_s=min(1.0, left_s))
        ticket = await lock.approvals.show(ticket.id)
        if ticket.step > asked:
            page.line(f"  nobody has decided yet; {ticket.chain[ticket.step].group} were asked too")
            asked = ticket.step
        if pending.pending and ticket.state not in ("PENDING", "APPROVED"):
            # Another process has gone on with it; under its key the call is answered with what came of that.
            if request.key is None:
                raise Failure("E3410", f"another process went on with it; see interlock calls show {ticket.call}")
            pending = await lock.gateway.invoke(request)
    return pending


async def _answer(lock: Interlock, out: Output, result: Result) -> int:
    """Show a result. Whoever was asked on its way is told before this process ends."""
    if result.pending:
        from interlock.cli.tickets import show_waiting

        ticket = await lock.approvals.show(result.metadata["pending"]["ticketId"])

        def show(page: Page) -> None:
            show_waiting(lock, page, ticket)
            page.hook_outputs(result)

        out.answer(result.document(), show)
    else:
        out.answer(result.document(), lambda page: page.result(result))
    if result.error is not None and result.error.code == "E3208":
        await lock.courier.deliver_due()
    return 0 if result.ok else 1


@click.group()
def calls() -> None:
    """What was called and what became of it.

    \b
    interlock calls list
    interlock calls running
    interlock calls top
    interlock calls show 01JC…
    interlock calls save 01JC… reports
    interlock calls payload 01JC…
    interlock calls resume
    interlock calls reconcile
    """


# list


def _narrowed(command: Any) -> Any:
    """The options that say which calls are wanted."""
    for option in (
        click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many."),
        click.option("--until", callback=_moment, metavar="TIME", help="Only calls before this time."),
        click.option(
            "--since", callback=_moment, metavar="TIME", help="Only calls from this time on: ISO 8601, or 2h."
        ),
        click.option("--caller", help="Only calls made for this caller."),
        click.option("--tool", help="Only calls of this tool, by name or NAME@VERSION."),
        click.option("--error", help="Only calls that failed with this code or error name."),
    ):
        command = option(command)
    return command


def _moment(_: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """A time, or how long ago it was, as records write times."""
    if value is None:
        return None
    import time
    from datetime import datetime

    from interlock.core.clock import iso

    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(value[-1:])
    try:
        if seconds is not None and value[:-1].isdecimal():
            return iso(int((time.time() - int(value[:-1]) * seconds) * 1000))
        return iso(round(datetime.fromisoformat(value).timestamp() * 1000))
    except (ValueError, OverflowError):
        words = "is a time as in 2026-07-01T12:00:00Z, or how long ago: 30m, 2h, 7d"
        raise click.BadParameter(f"`{value}` is none; {option.name} {words}") from None


_BEFORE = click.option("--before", type=click.IntRange(1), help="Go on where the page before ended.")


@calls.command("list")
@click.option("--state", help="Only calls in this state: running, awaiting_approval, succeeded, failed, unknown …")
@_BEFORE
@_narrowed
@looking
async def list_calls(lock: Interlock, out: Output, /, before: int | None, limit: int, **wanted: str | None) -> int:
    """The latest calls, newest first; those that run or wait for a person count from when they began.

    A read is on record once it has run for a quarter of a second, or has ended: until then it is not listed.
    A page looks through 50,000 records at most. Where there are more, the command to go on with is shown.

    \b
    interlock calls list --limit 50
    interlock calls list --state failed --tool demo.post --since 2h
    interlock calls list --error E3402 --caller did:key:z6Mk…
    """
    return await _list(lock, out, before, limit, wanted)


@calls.command()
@_BEFORE
@_narrowed
@looking
async def running(lock: Interlock, out: Output, /, before: int | None, limit: int, **wanted: str | None) -> int:
    """The calls that run now, newest first, in every process on this home.

    Where there are more, the option to go on with is shown.

    \b
    interlock calls running
    """
    return await _list(lock, out, before, limit, {**wanted, "state": "running"})


async def _list(lock: Interlock, out: Output, before: int | None, limit: int, wanted: dict[str, str | None]) -> int:
    from interlock.api.listing import Listing, Wanted

    documents, place = await Listing(lock).page(Wanted(**wanted), by=None, before=before, limit=limit)

    def show(page: Page) -> None:
        from interlock.cli.render import clock_time, duration

        rows = [
            (
                clock_time(one["at"]),
                one["invocation_id"],
                one["tool"],
                one["state"] + (f" {one['error_code']}" if one["error_code"] else ""),
                "" if one["source"] in (None, "compute") else one["source"],
                "" if one["latency_ms"] is None else duration(one["latency_ms"]),
                one["caller"],
            )
            for one in documents
        ]
        if rows:
            page.table(rows, ("when", "call", "tool", "state", "source", "took", "caller"))
        elif place is None and before is None and not any(wanted.values()):
            page.line("no calls yet; make one: interlock call TOOL '{…}'")
        else:
            page.line("no such calls" + ("" if place is None else " among the records that were looked through"))
        if place is not None:
            page.line(f"there may be more; go on with the same options and --before {place}")

    out.answer({"calls": documents, "before": place}, show)
    return 0


@calls.command()
@click.option(
    "--by",
    "lead",
    type=click.Choice(("failures", "cost", "calls")),
    default="failures",
    show_default=True,
    help="Failures and calls are counted per tool, cost per caller.",
)
@click.option(
    "--since", callback=_moment, metavar="TIME", help="From this time on: ISO 8601, or 2h. A day ago unless said."
)
@click.option("--until", callback=_moment, metavar="TIME", help="Before this time.")
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="How many.")
@looking
async def top(lock: Interlock, out: Output, /, lead: Lead, since: str | None, until: str | None, limit: int) -> int:
    """Which tools fail most or are called most, or who spent most.

    \b
    interlock calls top
    interlock calls top --by cost --since 7d
    """
    from interlock.api.listing import Listing

    told = await Listing(lock).top(lead, by=None, since=since, until=until, limit=limit)

    def show(page: Page) -> None:
        whose = "caller" if lead == "cost" else "tool"
        rows = [
            (str(one[whose]), f"{one['calls']:,}", f"{one['failures']:,}", f"{one['cost']:g}") for one in told["top"]
        ]
        if rows:
            page.table(rows, (whose, "calls", "failures", "cost"))
        else:
            page.line(f"no {lead} since {told['since']}")

    out.answer(told, show)
    return 0


# show


@calls.command()
@click.argument("call_id", metavar="ID")
@looking
async def show(lock: Interlock, out: Output, /, call_id: str) -> int:
    """Everything the journal knows of one call. ID may be shortened while it stays unique.

    \b
    interlock calls show 01JCXK2M4Q8Z
    """
    from interlock.cli.history import find

    history = find(lock.journal, call_id)
    document = {
        "invocation_id": history.call,
        "tool": history.tool,
        "state": history.state,
        "records": [entry.document() for entry in history.entries],
    }
    out.answer(document, lambda page: _show_history(lock, page, history))
    return 0


def _show_history(lock: Interlock, page: Page, history: History) -> None:
    from interlock.cli.render import Text, clock_time

    facts = history.facts
    page.line(Text(history.call, "bold"), f"   {history.tool}   {history.state}")
    rows: list[tuple[str, Cell]] = [
        (name, with_names(lock, str(facts[field])))
        for name, field in _FACTS
        if facts.get(field) is not None and facts.get(field) != ""
    ]
    rules: list[str] = facts.get("rules") or []
    if facts.get("authDecision"):
        rows.append(("decision", f"{facts['authDecision']} {', '.join(rules)}   {facts.get('policy', '')}".rstrip()))
    decided: Json = facts.get("decision") or {}
    if decided.get("source") not in (None, "policy"):
        rows.append(("said by", f"{decided['source']}: {decided.get('reason')}"))
    rows.extend((name, " → ".join(facts[name])) for name in ("phases", "states") if facts.get(name))
    if facts.get("error_code"):
        rows.append(("error", f"{facts.get('errorCode')}  {facts['error_code']}"))
    rows.extend(("saved", f"{one.get('label')}   {one.get('bytes')} bytes") for one in history.all("checkpoint"))
    predicted: list[Json] = facts.get("predicted") or []
    rows.extend(("predicted", f"{one['operation']} {one['resource']}") for one in predicted)
    for one in history.all("mutation"):
        values = f"{_short(one.get('previousValue'))} → {_short(one.get('newValue'))}"
        rows.append(("changed", f"{one.get('mutationType')} {one.get('affectedResource')}   {values}"))
    warnings: list[Any] = facts.get("warnings") or []
    rows.extend(("warning", str(warning)) for warning in warnings)
    left: list[Json] = facts.get("artifacts") or []
    rows.extend(("left", f"{one['path']}   {one['size']:,} bytes   {one['ref']}") for one in left)
    if facts.get("compensation"):
        rows.append(("undo", f"interlock calls undo {history.call} --key YOUR-KEY"))
    differences: list[str] = facts.get("previewDifferences") or []
    rows.extend(("otherwise", difference) for difference in differences)
    page.facts(rows)
    told = [(clock_time(at), with_names(lock, words)) for at, words in history.approval()]
    if told:
        page.line("approval")
        page.table(told, indent="  ")
    page.line("records")
    listing = [(str(entry.seq), entry.kind, clock_time(entry.at), entry.hash[:16]) for entry in history.entries]
    page.table(listing, indent="  ")


_FACTS = (
    ("caller", "callerId"), ("agent", "agentId"), ("door", "door"), ("operation", "operation"),
    ("key", "idempotencyKey"), ("session", "session"), ("parent", "parent"), ("replay of", "replayOf"),
    ("task", "task"), ("ticket", "approvalTicketId"), ("input", "inputHash"),
    ("class", "mutationClass"), ("took ms", "latencyMs"), ("trace", "traceId"), ("settled by", "by"),
)  # fmt: skip


def _short(value: Any) -> str:
    import orjson

    return "nothing" if value is None else orjson.dumps(value).decode()[:80]


# save


@calls.command()
@click.argument("call_id", metavar="ID")
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(file_okay=False))
@as_holder
@over_home
async def save(lock: Interlock, out: Output, /, call_id: str, directory: str, token: str | None) -> int:
    """Write the files that a call of yours left to DIR, or here. Nothing that is there already is written over.

    \b
    interlock calls save 01JCXK2M4Q8Z… reports
    """
    from pathlib import Path

    from interlock.call.artifacts import recalled
    from interlock.cli import artifacts
    from interlock.cli.history import find
    from interlock.core.errors import Failure

    caller = await acting(lock, token)
    history = find(lock.journal, call_id, caller)
    left = recalled(history.facts.get("artifacts", ()))
    if not left:
        raise Failure("E3702", f"call {history.call} left no files")
    files = artifacts.check({one: await lock.read_payload(one.ref, caller=caller) for one in left})
    paths = artifacts.save(files, Path(directory))

    def show(page: Page) -> None:
        page.artifacts(left, indent="")
        page.line(f"written to {directory}")

    out.answer({"saved": [{**one.document(), "file": str(path)} for one, path in zip(left, paths, strict=True)]}, show)
    return 0


# undo


@calls.command()
@click.argument("call_id", metavar="ID")
@as_holder
@over_home
async def checkpoints(lock: Interlock, out: Output, /, call_id: str, token: str | None) -> int:
    """What a call of yours has saved of its work, oldest first; with --json, the states too.

    \b
    interlock calls checkpoints 01JCXK2M4Q8Z…
    """
    from interlock.cli.history import find

    caller = await acting(lock, token)
    saved = lock.checkpoints(find(lock.journal, call_id, caller).call, caller=caller)

    def show(page: Page) -> None:
        from interlock.cli.render import clock_time
        from interlock.core.clock import iso

        rows = [
            (
                clock_time(iso(one.at_ms)),
                one.label,
                one.checkpoint_type,
                f"{one.size} bytes",
                "" if one.error is None else one.error.code,
            )
            for one in saved
        ]
        if rows:
            page.table(rows, ("when", "label", "type", "size", ""))
        else:
            page.line("it saved no checkpoints")

    out.answer({"checkpoints": [one.document() for one in saved]}, show)
    return 0


@calls.command()
@click.argument("call_id", metavar="ID")
@click.option("--key", required=True, help="Your own key for the undoing; sent twice, it runs once.")
@as_holder
@over_home
async def undo(lock: Interlock, out: Output, /, call_id: str, key: str, token: str | None) -> int:
    """Run the compensation that a call stored when it succeeded. It is governed and recorded like any call.

    \b
    interlock calls undo 01JCXK2M4Q8Z… --key undo-order-17
    """
    from interlock.cli.history import find

    caller = await acting(lock, token)
    found = find(lock.journal, call_id, caller)
    return await _answer(lock, out, await lock.undo(found.call, key=key, caller=caller))


# cancel


@calls.command()
@click.argument("call_id", metavar="ID")
@as_holder
@over_home
async def inputs(lock: Interlock, out: Output, /, call_id: str, token: str | None) -> int:
    """What a call was sent and what its tool got, with every difference and its source.

    \b
    interlock calls inputs 01JCXK2M4Q8Z…
    """
    from interlock.api.service import Service
    from interlock.cli.history import find

    caller = await acting(lock, token)
    told = await Service(lock).calls.inputs(find(lock.journal, call_id, caller).call, caller)

    def show(page: Page) -> None:
        from interlock.call.phases import INPUTS
        from interlock.cli.render import value_text

        kept = told["model_input"] is not None
        rows = [(name, value_text(told[name])) for name in INPUTS] if kept else [("sha256", str(told["input_hash"]))]
        if told["withheld"]:
            rows.append(("not kept", told["withheld"].removeprefix("withheld: ")))
        page.facts(rows)
        changes = [
            (one["after"], one["source"], one["pointer"], value_text(one["value"]) if "value" in one else "")
            for one in told["input_changes"]
        ]
        if changes:
            page.table(changes, ("of", "by", "at", "value"))
        else:
            page.line("nothing was changed on the way")

    out.answer(told, show)
    return 0


@calls.command()
@click.argument("call_id", metavar="ID")
@click.option("--url", metavar="URL", help="The server that made the call; its spans are read over REST with a token.")
@as_holder
@over_home
async def trace(lock: Interlock, out: Output, /, call_id: str, url: str | None, token: str | None) -> int:
    """The spans of the trace that a call belongs to: its steps, how long each took and how it ended.

    Spans are kept by the process that made the call, if it traces calls (trace_ratio). Without --url, one span is shown
    from what is on record.

    \b
    interlock calls trace 01JCXK2M4Q8Z…
    interlock calls trace 01JCXK2M4Q8Z… --url http://127.0.0.1:8080 --token "$TOKEN"
    """
    from interlock.api.service import Service
    from interlock.cli.history import find

    caller = await acting(lock, token)
    call = find(lock.journal, call_id, caller).call
    if url is None:
        told = await Service(lock).calls.trace(call, caller)
    else:
        from interlock.cli.remote import fetched

        told = await fetched(url, f"/v1/calls/{call}/trace", token or held_token())

    def show(page: Page) -> None:
        page.facts([("call", told["invocation_id"]), ("trace", told["trace_id"])])
        rows = [
            (one["name"], one["start"], f"{one['duration_ms']:.3f}", one["status"], _whereto(one["attributes"]))
            for one in told["spans"]
        ]
        page.table(rows, ("span", "start", "ms", "status", "whereto"))
        if not told["complete"]:
            page.line("the steps of this call are not kept here; ask the server that made it: --url")

    out.answer(told, show)
    return 0


def _whereto(facts: dict[str, Any]) -> str:
    """Where a request went that left the process, and its answer: `attempt 2 to 127.0.0.1:80, GET, 503`."""
    place = ":".join(str(facts[name]) for name in ("server.address", "server.port") if name in facts)
    attempt = f"attempt {facts['external.attempt']}" if "external.attempt" in facts else ""
    status = facts.get("http.response.status_code", facts.get("rpc.response.status_code", ""))
    words = f"{attempt} to {place}" if attempt and place else attempt or place or str(facts.get("upstream", ""))
    return ", ".join(str(word) for word in (words, facts.get("http.request.method", ""), status) if word)


@calls.command()
@click.argument("call_id", metavar="ID")
@click.option(
    "--reason",
    type=click.Choice(["interruption", "discard", "fallback"]),
    default="interruption",
    help="Why: it labels the result. With discard, what a finished call left is let go of.",
)
@as_holder
@over_home
async def cancel(lock: Interlock, out: Output, /, call_id: str, reason: Reason, token: str | None) -> int:
    """Ask for a call to end that runs, is queued or waits for a person, whichever process runs it.

    The answer is canceled, unsupported (its tool cannot be cancelled) or finished (it has ended).

    \b
    interlock calls cancel 01JCXK2M4Q8Z…
    interlock calls cancel 01JCXK2M4Q8Z… --reason discard
    """
    from interlock.api.service import Service
    from interlock.cli.history import find

    caller = await acting(lock, token)
    found = find(lock.journal, call_id, caller)
    answer = await Service(lock).calls.cancel(found.call, caller, reason)
    words = {
        "canceled": "it was asked to end",
        "unsupported": "its tool cannot be cancelled; it runs to its end",
        "finished": "it has ended already" + ("; what it left is let go of" if reason == "discard" else ""),
    }
    out.answer(
        {"invocation_id": found.call, "outcome": answer},
        lambda page: page.line(f"{answer}   {found.call}   {words[answer]}"),
    )
    return 0 if answer == "canceled" else 1


# resume


@calls.command()
@click.argument("ticket_id", metavar="[TICKET]", required=False)
@looking
async def resume(lock: Interlock, out: Output, /, ticket_id: str | None) -> int:
    """Go on with a call that a person agreed to, or with all of them. Each is judged again, and runs once.

    \b
    interlock calls resume
    interlock calls resume apr_01JC…
    """
    refuse_token("going on with others' calls")
    if ticket_id is not None:
        return await _answer(lock, out, await lock.approvals.resume(ticket_id))
    results = await lock.approvals.resume_all()

    def show(page: Page) -> None:
        for result in results:
            page.result(result)
        if not results:
            page.line("nothing to go on with: no approved call waits")

    out.answer({"resumed": [result.document() for result in results]}, show)
    return 0 if all(result.ok for result in results) else 1


calls.add_command(payload)
calls.add_command(reconcile)
