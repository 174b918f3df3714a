"""`interlock calls`: find calls, see what became of them, continue, cancel, undo and settle them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import LazyGroup, at_server, reading
from interlock.cli.output import Output
from interlock.cli.viewer import time_at_rest

if TYPE_CHECKING:
    from interlock.api.listing import Lead
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.group(
    cls=LazyGroup,
    lazy={
        "cancel": "call_control:cancel",
        "checkpoints": "call_details:checkpoints",
        "follow": "call:follow",
        "inputs": "call_details:inputs",
        "part": "payloads:part_of_result",
        "payload": "payloads:payload",
        "reconcile": "reconcile:reconcile",
        "resume": "call_control:resume",
        "save": "call_details:save",
        "show": "call_details:show",
        "trace": "call_details:trace",
        "undo": "call_control:undo",
    },
    short_help="Calls and outcomes: list, show, follow, cancel, undo.",
)
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
