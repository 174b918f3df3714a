"""`interlock tools deprecate`, `quarantine` and `release`: versions that are retired or kept from running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import acting, as_holder, at_server, over_home, reading
from interlock.cli.completion import tool_names
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


# deprecate


async def _deprecate_at_server(server: Server, out: Output, /, tool: str, **given: Any) -> int:
    from interlock.cli.remote import part

    name, version = _named(tool)
    fields = {key: value for key, value in given.items() if value is not None}
    return _answer_deprecated(
        out, await server.post(f"/v1/tools/{part(name)}/deprecate", {"version": version, **fields})
    )


@click.command()
@at_server(_deprecate_at_server)
@click.argument("tool", metavar="TOOL@VERSION", shell_complete=tool_names)
@click.option("--successor", help="The tool to call instead, as TOOL or TOOL@VERSION.")
@click.option("--guide", help="Address of a page that says how to migrate.")
@click.option("--days", type=click.IntRange(0, 36_500), help="Days until its removal [default: 90].")
@click.option("--amend", is_flag=True, help="Correct what was announced before; other fields stay as they are.")
@click.option("--anyway", is_flag=True, help="Allow a successor that is not registered yet.")
@over_home
async def deprecate(app: Interlock, out: Output, /, tool: str, **given: Any) -> int:
    """Announce the end of one version. It runs until its removal date, and every result says so.

    \b
    interlock tools deprecate demo.post@1.2.0 --successor demo.post@2.0.0 --days 30
    interlock tools deprecate demo.post@1.2.0 --amend --guide https://example.org/moving
    """
    from interlock.api.registration import Registration

    name, version = _named(tool)
    registration = Registration(app, app.admissions)
    return _answer_deprecated(out, await registration.deprecate(name, version, by=app.caller, **given))


def _named(tool: str) -> tuple[str, str]:
    name, _, version = tool.partition("@")
    if not version:
        raise click.UsageError(f"name the version: interlock tools deprecate {name}@VERSION")
    return name, version


def _answer_deprecated(out: Output, report: Json) -> int:
    document = {"tool": report["tool_id"], **{name: report[name] for name in ("version", "state", "deprecation")}}
    notice: Json = document["deprecation"]

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD, clock_time

        words = f" {document['tool']}@{document['version']}   deprecated; it runs until "
        page.line(GOOD, words, clock_time(str(notice["removalDate"])))
        if notice.get("successor"):
            page.facts([("use", str(notice["successor"]))])

    out.answer(document, show)
    return 0


# quarantine and release


async def _quarantine_at_server(server: Server, out: Output, /) -> int:
    return _answer_quarantine(out, await server.get("/v1/quarantine"))


@click.command(short_help="Versions that differed from their contract, and why.")
@at_server(_quarantine_at_server)
@reading
def quarantine(reader: Reader, out: Output, /) -> int:
    """Versions whose behaviour differed from their contract, each with the reason.

    Calls of them are refused until a person has reviewed them: interlock tools release

    \b
    interlock tools quarantine
    """
    from interlock.api.at_rest import quarantined

    return _answer_quarantine(out, {"quarantine": quarantined(reader)})


def _answer_quarantine(out: Output, document: Json) -> int:
    found: list[Json] = document["quarantine"]

    def show(page: Page) -> None:
        if not found:
            page.line("nothing is in quarantine")
            return
        rows = [
            (one["tool"], "released" if one["lifted"] else "kept out", one["reason"], one["invocation_id"])
            for one in found
        ]
        page.table(rows, head=("tool", "state", "because", "call"))

    out.answer(document, show)
    return 0


async def _release_at_server(server: Server, out: Output, /, tool: str, reason: str) -> int:
    return _answer_released(out, await server.post("/v1/quarantine/release", {"tool": tool, "reason": reason}))


@click.command(short_help="Release a version from quarantine, after a review.")
@at_server(_release_at_server)
@click.argument("tool", metavar="TOOL@VERSION", shell_complete=tool_names)
@click.option("--reason", required=True, help="Why it may run again; recorded with your name.")
@as_holder
@over_home
async def release(app: Interlock, out: Output, /, tool: str, reason: str, token: str | None) -> int:
    """Release a version from quarantine, as a person who has reviewed it. Needs the scope tools:admin.

    \b
    interlock tools release demo.count@1.0.0 --reason 'the file was its own cache'
    """
    from interlock.api.registration import Registration

    registration = Registration(app, app.admissions)
    return _answer_released(out, await registration.release(tool, reason=reason, by=await acting(app, token)))


def _answer_released(out: Output, document: Json) -> int:
    out.done(document, f"{document['released']}   may run again")
    return 0
