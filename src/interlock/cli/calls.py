"""`interlock calls`: find calls, see what became of them, continue, cancel, undo and settle them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.call import answer, answer_from, answer_resumed, answer_status, follow, part, send
from interlock.cli.command import (
    Output,
    acting,
    as_holder,
    at_server,
    held_token,
    looking,
    over_home,
    reading,
    refuse_token,
)
from interlock.cli.payloads import part_of_result, payload
from interlock.cli.reconcile import reconcile
from interlock.cli.viewer import AtRest, Remote, Viewer, time_at_rest, with_names

if TYPE_CHECKING:
    from interlock.api.history import History
    from interlock.api.interlock import Interlock
    from interlock.api.listing import Lead
    from interlock.call.phases import Reason
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page
    from interlock.store.port import Reader

Json = dict[str, Any]


@click.group(short_help="Calls and outcomes: list, show, follow, cancel, undo.")
def calls() -> None:
    """Calls and their outcomes: list, show, follow, cancel, resume and undo them.

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
        click.option("--caller", help="Only calls by this agent or for this caller, by name or id."),
        click.option("--tool", help="Only calls of this tool, by name or NAME@VERSION."),
        click.option("--error", help="Only calls that failed with this code or error name."),
    ):
        command = option(command)
    return command


class _Ago(str):
    """A time that was given as a span before now, by the clock of this machine. The store may have a better clock."""

    __slots__ = ("ago_ms",)
    ago_ms: int

    def at_store(self, reader: Reader, out: Output) -> str:
        from interlock.core.clock import iso

        return iso(time_at_rest(reader, out.session.path) - self.ago_ms)


def _by_store(reader: Reader, out: Output, value: str | None) -> str | None:
    """A time for a search in a store: a span before now is one before the store's time."""
    return value.at_store(reader, out) if isinstance(value, _Ago) else value


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
            ago_ms = int(value[:-1]) * seconds * 1000
            ago = _Ago(iso(int(time.time() * 1000) - ago_ms))
            ago.ago_ms = ago_ms
            return ago
        return iso(round(datetime.fromisoformat(value).timestamp() * 1000))
    except (ValueError, OverflowError):
        words = "is a time as in 2026-07-01T12:00:00Z, or how long ago: 30m, 2h, 7d"
        raise click.BadParameter(f"`{value}` is none; {option.name} {words}") from None


_BEFORE = click.option("--before", type=click.IntRange(1), help="Go on where the page before ended.")


async def _list_at_server(server: Server, out: Output, /, before: int | None, limit: int, **wanted: str | None) -> int:
    document = await server.get("/v1/calls", before=before, limit=limit, **wanted)
    return _answer_list(out, document["calls"], document["before"], asked=before is not None or any(wanted.values()))


async def _running_at_server(
    server: Server, out: Output, /, before: int | None, limit: int, **wanted: str | None
) -> int:
    return await _list_at_server(server, out, before, limit, **{**wanted, "state": "running"})


@calls.command("list", short_help="The latest calls, newest first.")
@at_server(_list_at_server)
@click.option(
    "--state", "--status", help="Only calls in this state: running, awaiting_approval, succeeded, failed, unknown …"
)
@_BEFORE
@_narrowed
@reading
def list_calls(reader: Reader, out: Output, /, before: int | None, limit: int, **wanted: str | None) -> int:
    """The latest calls, newest first; those that run or wait for a person count from when they began.

    A read is on record once it has run for a quarter of a second, or has ended: until then it is not listed.
    A page looks through 50,000 records at most. Where there are more, the command to go on with is shown.

    \b
    interlock calls list --limit 50
    interlock calls list --state failed --tool demo.post --since 2h
    interlock calls list --error E3402 --caller research-7
    """
    return _list(reader, out, before, limit, wanted)


@calls.command(short_help="The calls that run now, newest first.")
@at_server(_running_at_server)
@_BEFORE
@_narrowed
@reading
def running(reader: Reader, out: Output, /, before: int | None, limit: int, **wanted: str | None) -> int:
    """The calls that run now, newest first, in every process on this data directory.

    Where there are more, the option to go on with is shown.

    \b
    interlock calls running
    """
    return _list(reader, out, before, limit, {**wanted, "state": "running"})


def _list(reader: Reader, out: Output, before: int | None, limit: int, wanted: dict[str, str | None]) -> int:
    from interlock.api.listing import Wanted, every_call

    wanted = {name: _by_store(reader, out, one) for name, one in wanted.items()}
    documents, place = every_call(reader, Wanted(**wanted), before=before, limit=limit)
    return _answer_list(out, documents, place, asked=before is not None or any(wanted.values()))


def _answer_list(out: Output, documents: list[Json], place: int | None, *, asked: bool) -> int:
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
                _asked_by(one),
            )
            for one in documents
        ]
        if rows:
            page.table(rows, ("when", "call", "tool", "state", "source", "took", "caller"))
        elif place is None and not asked:
            page.line("no calls yet; make one: interlock call TOOL '{…}'")
        else:
            page.line("no such calls" + ("" if place is None else " among the records that were looked through"))
        if place is not None:
            page.line(f"there may be more; go on with the same options and --before {place}")

    out.answer({"calls": documents, "before": place}, show)
    return 0


def _asked_by(one: Json) -> str:
    """The caller of a call, and the person they acted for; older servers do not name agents."""
    caller = one.get("caller_name") or one["caller"]
    agent = one.get("agent_name") or one.get("agent")
    return f"{agent} for {caller}" if agent else str(caller)


async def _top_at_server(
    server: Server, out: Output, /, lead: Lead, since: str | None, until: str | None, limit: int
) -> int:
    return _answer_top(out, lead, await server.get("/v1/calls/top", by=lead, since=since, until=until, limit=limit))


@calls.command(short_help="Tools and callers with most failures, cost or calls.")
@at_server(_top_at_server)
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
@reading
def top(reader: Reader, out: Output, /, lead: Lead, since: str | None, until: str | None, limit: int) -> int:
    """List the tools that fail most or are called most, or the callers that spent most.

    \b
    interlock calls top
    interlock calls top --by cost --since 7d
    """
    from interlock.api.listing import top_of_all

    since, until = (_by_store(reader, out, one) for one in (since, until))
    now_ms = time_at_rest(reader, out.session.path)
    return _answer_top(out, lead, top_of_all(reader, lead, now_ms=now_ms, since=since, until=until, limit=limit))


def _answer_top(out: Output, lead: Lead, document: Json) -> int:
    def show(page: Page) -> None:
        whose = "caller" if lead == "cost" else "tool"
        rows = [
            (str(one.get("caller_name") or one[whose]), f"{one['calls']:,}", f"{one['failures']:,}", f"{one['cost']:g}")
            for one in document["top"]
        ]
        if rows:
            page.table(rows, (whose, "calls", "failures", "cost"))
        else:
            page.line(f"no {lead} since {document['since']}")

    out.answer(document, show)
    return 0


# show


async def _show_at_server(server: Server, out: Output, /, call_id: str) -> int:
    from interlock.cli.history import history_at

    viewer = await Remote.of(server)
    if "audit:read" not in await server.scopes():
        return answer_status(out, await server.get(f"/v1/calls/{part(call_id)}"))
    return _answer_history(out, viewer, await history_at(server, call_id))


@calls.command()
@at_server(_show_at_server)
@click.argument("call_id", metavar="ID")
@reading
def show(reader: Reader, out: Output, /, call_id: str) -> int:
    """Everything the journal knows of one call. ID may be shortened while it stays unique.

    With --server: the whole ID, and of the journal what the scope audit:read lets you see; without it, how the call
    stands.

    \b
    interlock calls show 01JCXK2M4Q8Z
    """
    from interlock.api.history import find_in

    return _answer_history(out, AtRest(reader, out.session.path), find_in(reader, call_id))


def _answer_history(out: Output, viewer: Viewer, history: History) -> int:
    document = {
        "invocation_id": history.call,
        "tool": history.tool,
        "state": history.state,
        "records": [entry.document() for entry in history.entries],
    }
    out.answer(document, lambda page: _show_history(viewer, page, history))
    return 0


def _show_history(viewer: Viewer, page: Page, history: History) -> None:
    from interlock.cli.history import approval_steps
    from interlock.cli.render import Text, clock_time

    facts = history.facts
    page.line(Text(history.call, "bold"), f"   {history.tool}   {history.state}")
    rows: list[tuple[str, Cell]] = [
        (name, with_names(viewer, str(facts[field])))
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
    steps = [(clock_time(at), with_names(viewer, words)) for at, words in approval_steps(history)]
    if steps:
        page.line("approval")
        page.table(steps, indent="  ")
    page.line("records")
    listing = [(str(entry.seq), entry.kind, clock_time(entry.at), entry.hash[:16]) for entry in history.entries]
    page.table(listing, indent="  ")


_FACTS = (
    ("caller", "callerId"), ("agent", "agentId"), ("door", "door"), ("operation", "operation"),
    ("key", "idempotencyKey"), ("key from", "keyFrom"), ("resend protection", "resendProtection"),
    ("session", "session"), ("parent", "parent"), ("replay of", "replayOf"),
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
async def save(app: Interlock, out: Output, /, call_id: str, directory: str, token: str | None) -> int:
    """Write the files that a call of yours left to DIR, or here. Nothing that is there already is written over.

    \b
    interlock calls save 01JCXK2M4Q8Z… reports
    """
    from pathlib import Path

    from interlock.api.history import find
    from interlock.cli import artifacts
    from interlock.core.errors import Failure

    caller = await acting(app, token)
    history = await find(app.journal, call_id, caller)
    left = history.artifacts
    if not left:
        raise Failure("E3702", f"call {history.call} left no files")
    files = artifacts.check({one: await app.read_payload(one.ref, caller=caller) for one in left})
    paths = artifacts.save(files, Path(directory))

    def show(page: Page) -> None:
        page.artifacts(left, indent="")
        page.line(f"written to {directory}")

    out.answer({"saved": [{**one.document(), "file": str(path)} for one, path in zip(left, paths, strict=True)]}, show)
    return 0


# undo


async def _checkpoints_at_server(server: Server, out: Output, /, call_id: str) -> int:
    found: list[Json] = []
    after: int | None = 0
    while after is not None:
        told = await server.get(f"/v1/calls/{part(call_id)}/checkpoints", after=after, limit=100)
        found += told["checkpoints"]
        after = told["after"]
    return _answer_checkpoints(out, found)


@calls.command(short_help="The checkpoints of a call of yours, oldest first.")
@at_server(_checkpoints_at_server)
@click.argument("call_id", metavar="ID")
@as_holder
@over_home
async def checkpoints(app: Interlock, out: Output, /, call_id: str, token: str | None) -> int:
    """The checkpoints of a call of yours, oldest first; with --json, the saved states too.

    \b
    interlock calls checkpoints 01JCXK2M4Q8Z…
    """
    from interlock.api.history import find

    caller = await acting(app, token)
    saved = await app.checkpoints((await find(app.journal, call_id, caller)).call, caller=caller)
    return _answer_checkpoints(out, [one.document() for one in saved])


def _answer_checkpoints(out: Output, saved: list[Json]) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import clock_time

        rows = [
            (
                clock_time(one["timestamp"]),
                str(one["label"]),
                str(one["checkpoint_type"]),
                f"{one['size']} bytes",
                "" if one["error"] is None else str(one["error"]["error_code"]),
            )
            for one in saved
        ]
        if rows:
            page.table(rows, ("when", "label", "type", "size", ""))
        else:
            page.line("it saved no checkpoints")

    out.answer({"checkpoints": saved}, show)
    return 0


async def _undo_at_server(server: Server, out: Output, /, call_id: str, key: str) -> int:
    path = f"/v1/calls/{part(call_id)}/undo"
    return await answer_from(server, out, await send(server, path, {"idempotency_key": key}))


@calls.command()
@at_server(_undo_at_server)
@click.argument("call_id", metavar="ID")
@click.option("--key", required=True, help="Your own key for the undoing; sent twice, it runs once.")
@as_holder
@over_home
async def undo(app: Interlock, out: Output, /, call_id: str, key: str, token: str | None) -> int:
    """Run the compensation that a call stored when it succeeded. It is governed and recorded like any call.

    \b
    interlock calls undo 01JCXK2M4Q8Z… --key undo-order-17
    """
    from interlock.api.history import find

    caller = await acting(app, token)
    found = await find(app.journal, call_id, caller)
    return await answer(app, out, await app.undo(found.call, key=key, caller=caller))


# cancel


async def _inputs_at_server(server: Server, out: Output, /, call_id: str) -> int:
    return _answer_inputs(out, await server.get(f"/v1/calls/{part(call_id)}/inputs"))


@calls.command(short_help="The arguments that were sent and those the tool got.")
@at_server(_inputs_at_server)
@click.argument("call_id", metavar="ID")
@as_holder
@over_home
async def inputs(app: Interlock, out: Output, /, call_id: str, token: str | None) -> int:
    """The arguments that a call was sent and those that its tool got, with every difference and its source.

    \b
    interlock calls inputs 01JCXK2M4Q8Z…
    """
    from interlock.api.history import find
    from interlock.api.service import Service

    caller = await acting(app, token)
    return _answer_inputs(out, await Service(app).calls.inputs((await find(app.journal, call_id, caller)).call, caller))


def _answer_inputs(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        from interlock.call.phases import INPUTS
        from interlock.cli.render import value_text

        stored = document["model_input"] is not None
        rows = (
            [(name, value_text(document[name])) for name in INPUTS]
            if stored
            else [("sha256", str(document["input_hash"]))]
        )
        if document["withheld"]:
            rows.append(("not kept", document["withheld"].removeprefix("withheld: ")))
        page.facts(rows)
        changes = [
            (one["after"], one["source"], one["pointer"], value_text(one["value"]) if "value" in one else "")
            for one in document["input_changes"]
        ]
        if changes:
            page.table(changes, ("of", "by", "at", "value"))
        else:
            page.line("nothing was changed on the way")

    out.answer(document, show)
    return 0


async def _trace_at_server(server: Server, out: Output, /, call_id: str, url: str | None) -> int:
    if url is not None:
        raise click.UsageError("--url and --server exclude each other: both name the server to ask")
    return _answer_trace(out, await server.get(f"/v1/calls/{part(call_id)}/trace"))


@calls.command(short_help="The spans of a call's trace: its steps and their times.")
@at_server(_trace_at_server)
@click.argument("call_id", metavar="ID")
@click.option("--url", metavar="URL", help="The server that made the call; its spans are read over REST with a token.")
@as_holder
@over_home
async def trace(app: Interlock, out: Output, /, call_id: str, url: str | None, token: str | None) -> int:
    """The spans of the trace that a call belongs to: its steps, how long each took and how it ended.

    Spans are kept by the process that made the call, if it traces calls (trace_ratio). Without --url, one span is shown
    from what is on record.

    \b
    interlock calls trace 01JCXK2M4Q8Z…
    interlock calls trace 01JCXK2M4Q8Z… --url http://127.0.0.1:8080 --token "$TOKEN"
    """
    from interlock.api.history import find
    from interlock.api.service import Service

    caller = await acting(app, token)
    call = (await find(app.journal, call_id, caller)).call
    if url is None:
        document = await Service(app).calls.trace(call, caller)
    else:
        from interlock.cli.remote import Server

        server = Server(url, token or held_token(), insecure=out.session.insecure)
        document = await server.get(f"/v1/calls/{call}/trace")
    return _answer_trace(out, document)


def _answer_trace(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        page.facts([("call", document["invocation_id"]), ("trace", document["trace_id"])])
        rows = [
            (one["name"], one["start"], f"{one['duration_ms']:.3f}", one["status"], _whereto(one["attributes"]))
            for one in document["spans"]
        ]
        page.table(rows, ("span", "start", "ms", "status", "whereto"))
        if not document["complete"]:
            page.line("the steps of this call are not kept here; ask the server that made it: --url")

    out.answer(document, show)
    return 0


def _whereto(facts: dict[str, Any]) -> str:
    """The target and the answer of an outgoing request: `attempt 2 to 127.0.0.1:80, GET, 503`."""
    place = ":".join(str(facts[name]) for name in ("server.address", "server.port") if name in facts)
    attempt = f"attempt {facts['external.attempt']}" if "external.attempt" in facts else ""
    status = facts.get("http.response.status_code", facts.get("rpc.response.status_code", ""))
    words = f"{attempt} to {place}" if attempt and place else attempt or place or str(facts.get("upstream", ""))
    return ", ".join(str(word) for word in (words, facts.get("http.request.method", ""), status) if word)


async def _cancel_at_server(server: Server, out: Output, /, call_id: str, reason: Reason) -> int:
    document = await server.ask("POST", f"/v1/calls/{part(call_id)}/cancel", query={"reason": reason})
    return _answer_cancel(out, document["invocation_id"], document["outcome"], reason)


@calls.command(short_help="Ask for a call to end that runs, is queued or waits.")
@at_server(_cancel_at_server)
@click.argument("call_id", metavar="ID")
@click.option(
    "--reason",
    type=click.Choice(["interruption", "discard", "fallback"]),
    default="interruption",
    help="Why: it labels the result. With discard, the result of a finished call is removed.",
)
@as_holder
@over_home
async def cancel(app: Interlock, out: Output, /, call_id: str, reason: Reason, token: str | None) -> int:
    """Ask for a call to end that runs, is queued or waits for a person, whichever process runs it.

    The answer is canceled, unsupported (its tool cannot be cancelled) or finished (it has ended).

    \b
    interlock calls cancel 01JCXK2M4Q8Z…
    interlock calls cancel 01JCXK2M4Q8Z… --reason discard
    """
    from interlock.api.history import find
    from interlock.api.service import Service

    caller = await acting(app, token)
    found = await find(app.journal, call_id, caller)
    return _answer_cancel(out, found.call, await Service(app).calls.cancel(found.call, caller, reason), reason)


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


# resume


async def _resume_at_server(server: Server, out: Output, /, ticket_id: str | None) -> int:
    if ticket_id is not None:
        found = await server.get(f"/v1/approvals/{part(ticket_id)}")
        return await answer_from(server, out, await send(server, f"/v1/tools/resume/{found['invocation_id']}", {}))
    document = await server.get("/v1/approvals", all="true")
    holder = (await Remote.of(server)).holder
    waiting = [one for one in document["tickets"] if one["status"] == "APPROVED" and one["requestedBy"] == holder]
    return answer_resumed(out, [await send(server, f"/v1/tools/resume/{one['invocation_id']}", {}) for one in waiting])


@calls.command(short_help="Go on with calls that a person agreed to.")
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
    if ticket_id is not None:
        return await answer(app, out, await app.approved_calls.resume(ticket_id))
    return answer_resumed(out, await app.approved_calls.resume_all())


calls.add_command(payload)
calls.add_command(part_of_result)
calls.add_command(follow)
calls.add_command(reconcile)
