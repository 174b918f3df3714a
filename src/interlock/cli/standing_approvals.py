"""Commands for approvals in advance: `interlock approvals grant`, `alone`, `standing` and `revoke`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.bounds import TypedBounds, arguments_within, bounds_in_words, read_eaches, read_patterns, read_ranges
from interlock.cli.command import acting, as_holder, at_rest, at_server, over_home, refuse_token
from interlock.cli.completion import tool_names
from interlock.cli.output import Output
from interlock.cli.tickets import refusal
from interlock.cli.values import parse_span
from interlock.cli.viewer import AtRest, Local, Remote, Viewer

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader, Standing
    from interlock.call.context import Caller
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page

Json = dict[str, Any]


async def _grant_at_server(
    server: Server,
    out: Output,
    /,
    tool: str,
    patterns: dict[str, list[str]],
    ranges: dict[str, Json],
    eaches: dict[str, list[str] | Json],
    texts: tuple[str, ...],
    values: tuple[str, ...],
    **given: Any,
) -> int:
    from interlock.api.approval_documents import standing_of
    from interlock.cli.remote import part

    bounds = TypedBounds(patterns, ranges, eaches, texts, values).check()
    document = await server.get(f"/v1/tools/{part(tool)}", version=given["versions"])
    wanted: Json = {
        "tool": tool,
        "caller": given["caller"],
        "arguments": arguments_within(document["parameters"], bounds, tool),
        "uses": given["uses"],
        "expires_in_s": max(1, given["lifetime_ms"] // 1000),
        **({} if given["versions"] is None else {"versions": given["versions"]}),
    }
    granted = standing_of(await server.post("/v1/approvals/standing", wanted))
    return _answer_granted(out, await Remote.of(server), granted)


@click.command(short_help="Agree in advance to calls, within bounds.")
@at_server(_grant_at_server)
@click.argument("tool", shell_complete=tool_names)
@click.option(
    "--caller",
    required=True,
    metavar="WHO",
    help="Whose calls: a name, a DID, an id such as local:bob, or group:NAME for all members of a group.",
)
@click.option(
    "--arg", "patterns", multiple=True, callback=read_patterns, metavar="NAME=PATTERN",
    help="What an argument may be; * and ? match in texts. Paths, URLs and hosts are compared in normal form. "
    "Name an argument several times for a set of values. An argument that is not named is not covered.",
)  # fmt: skip
@click.option(
    "--where", "ranges", multiple=True, callback=read_ranges, metavar="NAME<=NUMBER",
    help="How large or small the number in the argument NAME may be: <=, >=, < or >. Repeat it for both ends.",
)  # fmt: skip
@click.option(
    "--each", "eaches", multiple=True, callback=read_eaches, metavar="NAME=PATTERN",
    help="What each item of the list NAME may be, as for --arg; or NAME<=NUMBER, as for --where. An empty list is not "
    "covered.",
)  # fmt: skip
@click.option(
    "--any-text", "texts", multiple=True, metavar="NAME",
    help="An argument that may be any text, such as the body of a mail. Another one must be bounded.",
)  # fmt: skip
@click.option(
    "--any-value", "values", multiple=True, metavar="NAME",
    help="An argument that may be any value, such as the rows of a table. Another one must be bounded.",
)  # fmt: skip
@click.option("--uses", type=click.IntRange(1), required=True, help="How many calls.")
@click.option("--expires", "lifetime_ms", required=True, callback=parse_span, metavar="SPAN", help="7d, 12h, 30m.")
@click.option("--versions", metavar="RANGE", help="Of which versions [default: the present one].")
@as_holder
@over_home
async def grant(
    app: Interlock,
    out: Output,
    /,
    tool: str,
    caller: str,
    patterns: dict[str, list[str]],
    ranges: dict[str, Json],
    eaches: dict[str, list[str] | Json],
    texts: tuple[str, ...],
    values: tuple[str, ...],
    uses: int,
    lifetime_ms: int,
    versions: str | None,
    token: str | None,
) -> int:
    """Agree in advance to calls of one tool by one caller or group, within bounds. The rest is still asked.

    Members of a group share the uses. Your own calls and those of your agents are not covered. If you are the only
    person on this machine (approvals alone), name yourself as the caller to cover your own.

    \b
    interlock approvals grant demo.mail_statement --caller research-7 \\
        --arg account=cash --arg 'to=*@example.org' --uses 5 --expires 7d
    interlock approvals grant demo.post --caller research-7 --arg account=cash \\
        --where 'cents>=1' --where 'cents<=500' --uses 20 --expires 1d
    interlock approvals grant demo.post --caller group:bookkeepers --arg account=cash \\
        --where 'cents<=100' --uses 200 --expires 7d
    interlock approvals grant files.stage --caller research-7 \\
        --each 'files=/srv/site/*' --any-value options --uses 20 --expires 1d
    """
    from interlock.api.approvals import contract_meant
    from interlock.core.errors import Failure

    bounds = TypedBounds(patterns, ranges, eaches, texts, values).check()
    by = await acting(app, token)
    contract = await contract_meant(app, tool, versions)
    who, tenant = await _caller_meant(app, caller, by)
    try:
        standing = await app.standing_approvals.grant(
            contract.address,
            by=by,
            caller=who,
            tenant=tenant,
            arguments=arguments_within(contract.input.document, bounds, contract.ref),
            uses=uses,
            expires_ms=app.clock.now_ms() + lifetime_ms,
            versions=versions,
        )
    except Failure as failure:
        if failure.code != "E3206":
            raise
        approval = contract.manifest.approval or app.settings.approval
        raise await refusal(app, failure, tuple(step.group for step in approval.chain), by) from None
    return _answer_granted(out, await Local.of(app), standing)


def _answer_granted(out: Output, viewer: Viewer, standing: Standing) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {standing.id}", right=f"interlock approvals revoke {standing.id}")
        page.facts(_bounds(viewer, standing))

    out.answer(standing.document(), show)
    return 0


@click.command(short_help="State that you are the only person on this machine.")
@click.option("--end", is_flag=True, help="Take it back: from now on somebody else decides on your calls.")
@click.option("--reason", default="", help="Why; it goes on record.")
@over_home
async def alone(app: Interlock, out: Output, /, end: bool, reason: str) -> int:
    """State, on record, that you are the only person on this machine: then you may decide on your own calls.

    You may then agree to them in advance too (approvals grant), which --end takes back.

    \b
    interlock approvals alone --reason 'my own laptop'
    interlock approvals alone --end
    """
    refuse_token("stating that you are alone")
    by = app.caller
    ended = await app.approvals.state_alone(by=by, alone=not end, reason=reason)
    words = "must leave their own calls to others" if end else "may decide on their own calls, by their own statement"

    lines = "; ".join([f"{by.id} {words}", *(f"{one} is taken back" for one in ended)])
    out.answer({"caller": by.id, "alone": not end, "revoked": ended}, lambda page: page.line(lines))
    return 0


async def _caller_meant(app: Interlock, who: str, by: Caller) -> tuple[str, str]:
    """The id and the tenant that a caller of this name has."""
    from interlock.api.approvals import caller_meant
    from interlock.core.errors import Failure

    try:
        return await caller_meant(app, who, by)
    except Failure as failure:
        hint = "" if ":" in who else f", or write local:{who}"
        raise Failure(failure.code, f"{failure.in_full}; see interlock identities list{hint}") from None


def _bounds(viewer: Viewer, standing: Standing) -> list[tuple[str, Cell]]:
    from interlock.core.formatting import span

    return [
        ("tool", f"{standing.tool} {standing.versions}"),
        ("caller", viewer.name_of(standing.caller)),
        ("with", bounds_in_words(standing.arguments)),
        ("uses", f"{standing.uses - standing.used} of {standing.uses} left"),
        ("until", f"{span(standing.expires_ms - viewer.now_ms())} from now"),
        ("given by", viewer.name_of(standing.granted_by)),
    ]


def _outcome(viewer: Viewer, standing: Standing) -> str:
    from interlock.core.formatting import span

    if standing.revoked_ms is not None:
        return "taken back"
    left_ms = standing.expires_ms - viewer.now_ms()
    if left_ms <= 0:
        return "expired"
    return "used up" if standing.used >= standing.uses else f"{span(left_ms)} left"


async def _standing_at_server(server: Server, out: Output, /) -> int:
    return _answer_standing(out, await Remote.of(server), await _standings_at(server))


async def _standings_at(server: Server) -> list[Standing]:
    from interlock.api.approval_documents import standing_of

    return [standing_of(one) for one in (await server.get("/v1/approvals/standing"))["standing"]]


def _standing_at_rest(reader: Reader, out: Output, /) -> int:
    from interlock.api.approvals_at_rest import standing_approvals

    return _answer_standing(out, AtRest(reader, out.session.path), standing_approvals(reader))


@click.command("standing")
@at_server(_standing_at_server)
@at_rest(_standing_at_rest)
@as_holder
@over_home
async def list_standing(app: Interlock, out: Output, /, token: str | None) -> int:
    """Standing approvals, and how many uses are left.

    \b
    interlock approvals standing
    """
    return _answer_standing(out, await Local.of(app), await _standings(app, token))


def _answer_standing(out: Output, viewer: Viewer, approvals: list[Standing]) -> int:
    def show(page: Page) -> None:
        rows = [
            (one.id, _outcome(viewer, one), *(str(words) for name, words in _bounds(viewer, one) if name != "until"))
            for one in approvals
        ]
        if rows:
            page.table(rows, ("standing", "state", "tool", "caller", "with", "uses", "given by"))
        else:
            page.line("nothing was agreed to in advance; interlock approvals grant does")

    out.answer({"standing": [one.document() for one in approvals]}, show)
    return 0


async def _revoke_at_server(server: Server, out: Output, /, standing_id: str) -> int:
    from interlock.api.approval_documents import standing_of

    whole = _standing_id([one.id for one in await _standings_at(server)], standing_id)
    return _answer_revoked(out, standing_of(await server.ask("DELETE", f"/v1/approvals/standing/{whole}")))


@click.command()
@at_server(_revoke_at_server)
@click.argument("standing_id", metavar="ID")
@as_holder
@over_home
async def revoke(app: Interlock, out: Output, /, standing_id: str, token: str | None) -> int:
    """Take back what was agreed to in advance. It counts at once.

    \b
    interlock approvals revoke sta_01JC…
    """
    by = await acting(app, token)
    ids = [one.id for one in await _standings(app, token)]
    return _answer_revoked(out, await app.standing_approvals.revoke(_standing_id(ids, standing_id), by=by))


def _answer_revoked(out: Output, taken: Standing) -> int:
    out.done(taken.document(), f"{taken.id} is taken back", right=f"used {taken.used} of {taken.uses} times")
    return 0


async def _standings(app: Interlock, token: str | None) -> list[Standing]:
    """Standing approvals: all of them, or those that the holder of the token may see."""
    from interlock.api.approvals import has_part

    who = None if token is None else await acting(app, token)
    return [one for one in await app.standing_approvals.list() if who is None or await has_part(app, one, who)]


def _standing_id(ids: list[str], given: str) -> str:
    """Complete a shortened id: the only one of `ids` that begins or ends with `given`. E3702 for none, or several."""
    from interlock.core.errors import Failure

    part = given.strip("#…. ").upper().removeprefix("STA_")
    fitting = [one for one in ids if one[4:].startswith(part) or one.endswith(part)] if len(part) >= 4 else []
    if given not in ids and len(fitting) != 1:
        raise Failure("E3702", f"no standing approval `{given}`; see interlock approvals standing")
    return given if given in ids else fitting[0]
