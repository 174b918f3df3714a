"""Commands that show what is on record of one call: `calls show`, `checkpoints`, `inputs`, `trace` and `save`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.call import answer_status, part
from interlock.cli.command import at_server, held_token, reading
from interlock.cli.output import Output
from interlock.cli.over_call import TargetCall, over_call
from interlock.cli.viewer import AtRest, Remote, Viewer, with_names

if TYPE_CHECKING:
    from interlock.api.history import History
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page


Json = dict[str, Any]


async def _show_at_server(server: Server, out: Output, /, call_id: str) -> int:
    from interlock.cli.history import history_at

    viewer = await Remote.of(server)
    if "audit:read" not in await server.scopes():
        return answer_status(out, await server.get(f"/v1/calls/{part(call_id)}"))
    return _answer_history(out, viewer, await history_at(server, call_id))


@click.command()
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
        rows.append(("decided by", f"{decided['source']}: {decided.get('reason')}"))
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
    rows.extend(("differs from preview", difference) for difference in differences)
    page.facts(rows)
    steps = [(clock_time(at), with_names(viewer, words)) for at, words in approval_steps(history)]
    if steps:
        page.line("approval")
        page.table(steps, indent="  ")
    page.line("records")
    listing = [(str(entry.seq), entry.kind, clock_time(entry.at), entry.hash[:16]) for entry in history.entries]
    page.table(listing, indent="  ")


_FACTS = (
    ("caller", "callerId"), ("agent", "agentId"), ("endpoint", "door"), ("operation", "operation"),
    ("idempotency key", "idempotencyKey"), ("idempotency key from", "keyFrom"),
    ("resend protection", "resendProtection"),
    ("session", "session"), ("parent", "parent"), ("replay of", "replayOf"),
    ("task", "task"), ("ticket", "approvalTicketId"), ("input", "inputHash"),
    ("class", "mutationClass"), ("took ms", "latencyMs"), ("trace", "traceId"), ("settled by", "by"),
)  # fmt: skip


def _short(value: Any) -> str:
    import orjson

    return "nothing" if value is None else orjson.dumps(value).decode()[:80]


@click.command()
@click.argument("call_id", metavar="ID")
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(file_okay=False))
@over_call
async def save(app: Interlock, out: Output, target: TargetCall, /, directory: str) -> int:
    """Write the files that a call of yours left to DIR, or here. Nothing that is there already is written over.

    \b
    interlock calls save 01JCXK2M4Q8Z… reports
    """
    from pathlib import Path

    from interlock.cli import artifacts
    from interlock.core.errors import Failure

    left = target.history.artifacts
    if not left:
        raise Failure("E3702", f"call {target.call} left no files")
    files = artifacts.check({one: await app.read_payload(one.ref, caller=target.caller) for one in left})
    paths = artifacts.save(files, Path(directory))

    def show(page: Page) -> None:
        page.artifacts(left, indent="")
        page.line(f"written to {directory}")

    out.answer({"saved": [{**one.document(), "file": str(path)} for one, path in zip(left, paths, strict=True)]}, show)
    return 0


async def _checkpoints_at_server(server: Server, out: Output, /, call_id: str) -> int:
    found: list[Json] = []
    after: int | None = 0
    while after is not None:
        told = await server.get(f"/v1/calls/{part(call_id)}/checkpoints", after=after, limit=100)
        found += told["checkpoints"]
        after = told["after"]
    return _answer_checkpoints(out, found)


@click.command(short_help="The checkpoints of a call of yours, oldest first.")
@at_server(_checkpoints_at_server)
@click.argument("call_id", metavar="ID")
@over_call
async def checkpoints(app: Interlock, out: Output, target: TargetCall, /) -> int:
    """The checkpoints of a call of yours, oldest first; with --json, the saved states too.

    \b
    interlock calls checkpoints 01JCXK2M4Q8Z…
    """
    saved = await app.checkpoints(target.call, caller=target.caller)
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


async def _inputs_at_server(server: Server, out: Output, /, call_id: str) -> int:
    return _answer_inputs(out, await server.get(f"/v1/calls/{part(call_id)}/inputs"))


@click.command(short_help="The arguments that were sent and those the tool got.")
@at_server(_inputs_at_server)
@click.argument("call_id", metavar="ID")
@over_call
async def inputs(app: Interlock, out: Output, target: TargetCall, /) -> int:
    """The arguments that a call was sent and those that its tool got, with every difference and its source.

    \b
    interlock calls inputs 01JCXK2M4Q8Z…
    """
    from interlock.api.calls import Calls

    return _answer_inputs(out, await Calls(app).inputs(target.call, target.caller))


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


@click.command(short_help="The spans of a call's trace: its steps and their times.")
@at_server(_trace_at_server)
@click.argument("call_id", metavar="ID")
@click.option("--url", metavar="URL", help="The server that made the call; its spans are read over REST with a token.")
@over_call
async def trace(app: Interlock, out: Output, target: TargetCall, /, url: str | None) -> int:
    """The spans of the trace that a call belongs to: its steps, how long each took and how it ended.

    Spans are kept by the process that made the call, if it traces calls (trace_ratio). Without --url, one span is shown
    from what is on record.

    \b
    interlock calls trace 01JCXK2M4Q8Z…
    interlock calls trace 01JCXK2M4Q8Z… --url http://127.0.0.1:8080 --token "$TOKEN"
    """
    if url is None:
        from interlock.api.calls import Calls

        document = await Calls(app).trace(target.call, target.caller)
    else:
        from interlock.cli.remote import Server

        server = Server(url, target.token or held_token(), insecure=out.session.insecure)
        document = await server.get(f"/v1/calls/{target.call}/trace")
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
