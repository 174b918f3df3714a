"""`interlock call` and `interlock calls`: make a call, see what became of it, undo it, settle it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, over_home, parse_json

if TYPE_CHECKING:
    from interlock.app import Interlock
    from interlock.cli.history import History
    from interlock.cli.render import Cell, Page
    from interlock.core.errors import Failure
    from interlock.core.results import Result
    from interlock.gateway.reconcile import UnknownCall

Json = dict[str, Any]
UNSAID = object()


def _seconds(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter("must be a number of seconds above 0")
    return value


def _json(_: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """JSON, read before anything is opened: a slip of the pen makes no home."""
    return UNSAID if value is None else parse_json(value, str(parameter.name))


def _name(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.partition("@")[0].strip():
        raise click.BadParameter("name a tool; interlock tools list shows them")
    return value


@click.command()
@click.argument("tool", metavar="TOOL[@RANGE]", callback=_name)
@click.argument("arguments", metavar="['JSON' | -]", default="{}", callback=_json)
@click.option("--key", help="Your own key for this action; sent twice, it runs once. Writes need one.")
@click.option("--session", default="", help="The session whose state the tool sees.")
@click.option("--dry-run", is_flag=True, help="Say what would happen, and do nothing.")
@click.option("--timeout", "timeout_s", type=float, callback=_seconds, metavar="S", help="Seconds to allow.")
@over_home
async def call(
    lock: Interlock,
    out: Output,
    /,
    tool: str,
    arguments: Any,
    key: str | None,
    session: str,
    dry_run: bool,
    timeout_s: float | None,
) -> int:
    """Call a tool through all six phases. Arguments are one JSON object, or - to read it from stdin.

    Exits 0 when the tool succeeded, 1 when it failed or was refused, 2 when the command itself makes no sense.

    \b
    interlock call demo.balance '{"account": "cash"}'
    interlock call demo.post@^1 '{"account": "cash", "cents": 250}' --key order-17
    echo '{"account": "cash"}' | interlock call demo.balance - --json
    """
    from interlock.core.phases import Request

    name, _, spec = tool.partition("@")
    result = await lock.gateway.invoke(
        Request(
            tool=name,
            version=spec or None,
            arguments=arguments,  # whatever it is: the gateway judges it, and the refusal is on record
            caller=lock.caller,
            key=key,
            session=session,
            timeout_s=timeout_s,
            dry_run=dry_run,
            door="cli",
        )
    )
    return _answer(out, result)


def _answer(out: Output, result: Result) -> int:
    out.answer(result.document(), lambda page: page.result(result))
    return 0 if result.ok else 1


@click.group()
def calls() -> None:
    """What was called and what became of it.

    \b
    interlock calls list
    interlock calls show 01JC…
    interlock calls reconcile
    """


# list


@calls.command("list")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many, newest first.")
@over_home
async def list_calls(lock: Interlock, out: Output, /, limit: int) -> int:
    """The latest calls, newest first: those that are running, then those that have ended.

    \b
    interlock calls list --limit 50
    """
    documents = [*_running(lock), *_ended(lock, limit)][:limit]

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
        else:
            page.line("no calls yet; make one: interlock call TOOL '{…}'")

    out.answer({"calls": documents}, show)
    return 0


def _running(lock: Interlock) -> list[Json]:
    from interlock.core.clock import iso

    rows = lock.journal.read(
        "SELECT call, tool, version, caller, key, reserved_ms FROM reservation WHERE state = 'executing'"
        " ORDER BY reserved_ms DESC"
    )
    return [
        _line(call, iso(at_ms), f"{tool}@{version}", caller, key, "running")
        for call, tool, version, caller, key, at_ms in rows
    ]


def _ended(lock: Interlock, limit: int) -> list[Json]:
    import orjson

    lines: dict[str, Json] = {}
    rows = lock.journal.read(
        "SELECT call, body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT ?", (limit * 2,)
    )
    for call, body in rows:
        record: Json = orjson.loads(body)
        version = record.get("version")
        tool = f"{record.get('toolId')}@{version}" if version else str(record.get("toolId"))
        states: list[str] = record.get("states") or ["closed"]
        state = states[-1]
        if record.get("outcome") == "unknown":
            state = "settled" if _is_settled(lock, call) else "unknown"
        line = _line(call, record["timestamp"], tool, record.get("callerId"), record.get("idempotencyKey"), state)
        line |= {
            "error_code": record.get("error_code"),
            "source": record.get("source"),
            "latency_ms": record.get("latencyMs"),
        }
        lines.setdefault(call, line)
    return list(lines.values())[:limit]


def _is_settled(lock: Interlock, call: str) -> bool:
    return bool(lock.journal.read("SELECT 1 FROM journal WHERE call = ? AND kind IN ('settled', 'late')", (call,)))


def _line(call: str, at: str, tool: str, caller: Any, key: Any, state: str) -> Json:
    return {
        "invocation_id": call,
        "at": at,
        "tool": tool,
        "caller": str(caller),
        "key": key,
        "state": state,
        "error_code": None,
        "source": None,
        "latency_ms": None,
    }


# show


@calls.command()
@click.argument("call_id", metavar="ID")
@over_home
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
    out.answer(document, lambda page: _show_history(page, history))
    return 0


def _show_history(page: Page, history: History) -> None:
    from interlock.cli.render import Text, clock_time

    facts = history.facts
    page.line(Text(history.call, "bold"), f"   {history.tool}   {history.state}")
    rows: list[tuple[str, Cell]] = [
        (name, str(facts[field])) for name, field in _FACTS if facts.get(field) is not None and facts.get(field) != ""
    ]
    rules: list[str] = facts.get("rules") or []
    if facts.get("authDecision"):
        rows.append(("decision", f"{facts['authDecision']} {', '.join(rules)}   {facts.get('policy', '')}".rstrip()))
    rows.extend((name, " → ".join(facts[name])) for name in ("phases", "states") if facts.get(name))
    if facts.get("error_code"):
        rows.append(("error", f"{facts.get('errorCode')}  {facts['error_code']}"))
    predicted: list[Json] = facts.get("predicted") or []
    rows.extend(("predicted", f"{one['operation']} {one['resource']}") for one in predicted)
    for one in history.all("mutation"):
        values = f"{_short(one.get('previousValue'))} → {_short(one.get('newValue'))}"
        rows.append(("changed", f"{one.get('mutationType')} {one.get('affectedResource')}   {values}"))
    warnings: list[Any] = facts.get("warnings") or []
    rows.extend(("warning", str(warning)) for warning in warnings)
    if facts.get("compensation"):
        rows.append(("undo", f"interlock calls undo {history.call} --key YOUR-KEY"))
    page.facts(rows)
    page.line("records")
    listing = [(str(entry.seq), entry.kind, clock_time(entry.at), entry.hash[:16]) for entry in history.entries]
    page.table(listing, indent="  ")


_FACTS = (
    ("caller", "callerId"), ("agent", "agentId"), ("door", "door"), ("operation", "operation"),
    ("key", "idempotencyKey"), ("session", "session"), ("parent", "parent"), ("replay of", "replayOf"),
    ("input", "inputHash"),
    ("class", "mutationClass"), ("took ms", "latencyMs"), ("trace", "traceId"), ("settled by", "by"),
)  # fmt: skip


def _short(value: Any) -> str:
    import orjson

    return "nothing" if value is None else orjson.dumps(value).decode()[:80]


# undo


@calls.command()
@click.argument("call_id", metavar="ID")
@click.option("--key", required=True, help="Your own key for the undoing; sent twice, it runs once.")
@over_home
async def undo(lock: Interlock, out: Output, /, call_id: str, key: str) -> int:
    """Run the compensation that a call stored when it succeeded. It is governed and recorded like any call.

    \b
    interlock calls undo 01JCXK2M4Q8Z… --key undo-order-17
    """
    from interlock.cli.history import find

    return _answer(out, await lock.undo(find(lock.journal, call_id).call, key=key))


# reconcile


@calls.command()
@click.argument("call_id", metavar="[ID]", required=False)
@click.option("--happened", is_flag=True, help="It took effect: answer its key with this result from now on.")
@click.option("--did-not-happen", is_flag=True, help="It took no effect: free its key, so that it may run again.")
@click.option("--result", metavar="JSON", callback=_json, help="What it returned, with --happened; null if not said.")
@over_home
async def reconcile(
    lock: Interlock,
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

    waiting = unknown_calls(lock.journal)
    if call_id is None:
        if happened or did_not_happen or result is not UNSAID:
            raise click.UsageError("say which call: interlock calls reconcile ID --happened | --did-not-happen")
        out.answer({"unknown": [one.document() for one in waiting]}, lambda page: _show_unknown(page, waiting))
        return 0
    if happened == did_not_happen:
        raise click.UsageError("say one of --happened and --did-not-happen")
    if result is not UNSAID and not happened:
        raise click.UsageError("--result goes with --happened")
    value = None if result is UNSAID else result
    return await _settle(
        lock, out, _one_of(waiting, call_id), happened=happened, value=value, stated=result is not UNSAID
    )


def _one_of(waiting: list[UnknownCall], call_id: str) -> UnknownCall:
    from interlock.core.errors import Failure

    exact = [one for one in waiting if one.call == call_id]
    prefix = call_id.rstrip("….").upper()
    found = exact or [one for one in waiting if len(prefix) >= 6 and one.call.startswith(prefix)]
    if len(found) != 1:
        raise Failure("E3702", f"no one call `{call_id}` waits to be settled; see interlock calls reconcile")
    return found[0]


async def _settle(lock: Interlock, out: Output, one: UnknownCall, *, happened: bool, value: Any, stated: bool) -> int:
    from interlock.gateway.reconcile import reconcile as settle

    if stated:
        _check_result(lock, one, value)
    await settle(lock.journal, lock.caller, one.call, happened=happened, value=value)
    document = {**one.document(), "happened": happened, "result": value, "by": lock.caller.id}

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        word = "it happened; its key answers with this result" if happened else "it did not happen; its key is free"
        page.line(GOOD, f" {one.tool}@{one.version}   settled by {lock.caller.id}: {word}")

    out.answer({"settled": document}, show)
    return 0


def _check_result(lock: Interlock, one: UnknownCall, value: Any) -> None:
    """A stated result will be replayed as the tool's own, so it must be one the tool could have given."""
    from interlock.core.errors import Failure
    from interlock.core.explain import output_faults

    try:
        schema = lock.catalog.versions(one.tool)[one.version].contract.output
    except (KeyError, Failure):
        return  # the version is gone from the registry; the person's word stands
    faults = output_faults(schema, value)
    if faults:
        raise _misfit(one, [f"{fault.pointer or '/'} {fault.message}" for fault in faults])


def _misfit(one: UnknownCall, faults: list[str]) -> Failure:
    from interlock.core.errors import Failure

    return Failure("E3004", f"{one.tool}@{one.version} could not have returned that: {'; '.join(faults[:5])}")


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
