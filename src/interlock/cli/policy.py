"""`interlock policy`: show, check, test, explain and apply the policy, and drop cached decisions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from interlock.cli.command import anywhere, at_rest, at_server, looking, over_home, without_home
from interlock.cli.completion import tool_names
from interlock.cli.output import Output
from interlock.cli.values import parse_json
from interlock.cli.viewer import AtRest, Local, Remote, Viewer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(short_help="The rules by which calls are allowed, asked or denied.")
def policy() -> None:
    """The rules by which calls are allowed, sent to a person, or denied: Cedar, in policy.cedar of the data directory.

    \b
    interlock policy explain me demo.post '{"account": "cash", "cents": 250}'
    interlock policy check new.cedar
    interlock policy apply new.cedar
    """


# show


async def _show_at_server(server: Server, out: Output, /) -> int:
    return _answer_rules(out, await server.get("/v1/policy"))


@policy.command()
@at_server(_show_at_server)
@looking
async def show(app: Interlock, out: Output, /) -> int:
    """The rules in force, with their source text.

    \b
    interlock policy show
    """
    from interlock.api.policy import rules_document

    return _answer_rules(out, rules_document(app))


def _answer_rules(out: Output, document: Json) -> int:
    text = str(document.pop("text"))
    out.answer(document, lambda page: page.console.print(_plain(text.rstrip())))
    return 0


# default


@policy.command()
@anywhere
@click.option("--principals", is_flag=True, help="Print principals.toml instead: the callers and their scopes.")
@without_home
def default(out: Output, /, principals: bool) -> int:
    """The policy of a new data directory. A data directory without a policy allows nothing until one is applied.

    \b
    interlock policy default > first.cedar
    interlock policy apply first.cedar
    """
    from interlock.api.homes import first_texts

    name = "principals.toml" if principals else "policy.cedar"
    text = first_texts()[name]
    out.answer({"file": name, "text": text}, lambda page: click.echo(text, nl=False))
    return 0


# check


async def _check_at_server(server: Server, out: Output, /, file: Path | None) -> int:
    text = str((await server.get("/v1/policy"))["text"]) if file is None else _read(file)
    document = await server.post("/v1/policy/check", {"text": text})
    return _answer_check(out, file or Path("policy.cedar"), document["faults"])


@policy.command(short_help="Check a policy against the registered tools.")
@at_server(_check_at_server)
@click.argument("file", type=_FILE, required=False)
@looking
async def check(app: Interlock, out: Output, /, file: Path | None) -> int:
    """Check FILE, or the policy in force, against the registered tools and their arguments. Exits 1 if it has faults.

    A rule that reads a tool's own arguments must name the tool: action == Action::"demo.post".

    \b
    interlock policy check
    interlock policy check new.cedar
    """
    from interlock.api.policy import fault_document, shared_text
    from interlock.api.policy_faults import faults_of

    path = file or app.policy.path
    shared = None if file is not None else shared_text(app)
    text = _read(path) if shared is None else shared
    return _answer_check(out, path, [fault_document(fault) for fault in await faults_of(app, text)])


def _answer_check(out: Output, path: Path, faults: Sequence[Json]) -> int:
    usable = not any(fault["grave"] for fault in faults)
    document = {"file": str(path), "usable": usable, "faults": faults}
    out.answer(document, lambda page: _show_faults(page, path.name, faults))
    return 0 if usable else 1


def _show_faults(page: Page, name: str, faults: Sequence[Json]) -> None:
    from interlock.cli.render import BAD, GOOD, MAYBE

    if not any(fault["grave"] for fault in faults):
        page.line(GOOD, f" {name} can be used")
    page.table(
        [(BAD if one["grave"] else MAYBE, f"line {one['line']}", one["rule"] or "-", one["message"]) for one in faults]
    )


# test


async def _test_at_server(server: Server, out: Output, /, file: Path) -> int:
    return _answer_cases(out, await server.post("/v1/policy/test", {"cases": _cases(file)}))


@policy.command(short_help="Compare decisions with those that a file expects.")
@at_server(_test_at_server)
@click.argument("file", type=_FILE)
@over_home
async def test(app: Interlock, out: Output, /, file: Path) -> int:
    """Compare the decision on every case of FILE with the one it expects. Exits 1 if one differs.

    \b
    [[case]]
    principal = "me"
    tool = "demo.post"
    arguments = { account = "cash", cents = 250000 }
    expect = "ask"
    rule = "large-bookings"
    """
    from interlock.api.policy import run_cases

    return _answer_cases(out, await run_cases(app, app.caller, _cases(file), door="cli"))


def _answer_cases(out: Output, document: Json) -> int:
    rows: list[Json] = document["cases"]
    failed: int = document["failed"]

    def show_rows(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD

        columns = ("principal", "tool", "expect", "answer", "why")
        cells = [[GOOD if row["passed"] else BAD, *(str(row[column]) for column in columns)] for row in rows]
        page.table(cells, ("", *columns))
        page.line(f"{len(rows) - failed} of {len(rows)} cases as expected")

    out.answer(document, show_rows)
    return 1 if failed else 0


def _cases(file: Path) -> list[Json]:
    import tomllib

    from interlock.core.errors import Failure

    try:
        cases: Any = tomllib.loads(_read(file)).get("case")
    except tomllib.TOMLDecodeError as error:
        raise Failure("E3004", f"`{file.name}` cannot be read: {error}") from None
    if not isinstance(cases, list) or not cases:
        raise Failure("E3004", f"`{file.name}` has no [[case]]")
    for at, case in enumerate(cast("list[Json]", cases), 1):
        unknown = case.keys() - _CASE
        if unknown or "tool" not in case or case.get("expect") not in ("allow", "ask", "deny"):
            words = f"case {at} of `{file.name}` needs a tool and expect = allow, ask or deny"
            raise Failure("E3004", f"{words}; it may not say {', '.join(sorted(unknown))}" if unknown else words)
        if "at" in case:
            case["at"] = str(case["at"])  # TOML has times of its own, JSON has none
    return cast("list[Json]", cases)


_CASE = {"principal", "tool", "arguments", "operation", "expect", "rule", "at", "door", "budget_left"}


# explain


async def _explain_at_server(server: Server, out: Output, /, who: str, tool: str, arguments: str) -> int:
    question = {"principal": who, "tool": tool, "arguments": _object(arguments)}
    explanation = await server.post("/v1/policy/explain", question)
    return _answer_explanation(out, await Remote.of(server), explanation, who)


def _explain_at_rest(reader: Reader, out: Output, /, who: str, tool: str, arguments: str) -> int | None:
    from interlock.api.parts_at_rest import explain as explained

    explanation = explained(reader, out.session.path, who, tool, _object(arguments))
    if explanation is None:
        return None
    return _answer_explanation(out, AtRest(reader, out.session.path), explanation, who)


@policy.command(short_help="Why somebody may call a tool, or may not.")
@at_server(_explain_at_server)
@at_rest(_explain_at_rest)
@click.argument("who")
@click.argument("tool", metavar="TOOL[@RANGE]", shell_complete=tool_names)
@click.argument("arguments", default="{}")
@over_home
async def explain(app: Interlock, out: Output, /, who: str, tool: str, arguments: str) -> int:
    """Why WHO may call TOOL with ARGUMENTS, or may not: the rule that decides, and what would have to change.

    WHO is `me`, the name or DID of a registered identity, or an id that principals.toml names (local:alice).
    ARGUMENTS may be incomplete. Nothing is called.

    \b
    interlock policy explain me demo.post '{"account": "cash", "cents": 250}'
    interlock policy explain local:alice demo.mail_statement
    """
    from interlock.api.policy import explain_call

    explanation = await explain_call(app, app.caller, who, tool, _object(arguments), door="cli")
    return _answer_explanation(out, await Local.of(app), explanation, who)


def _object(text: str) -> Json:
    given = parse_json(text, "ARGUMENTS")
    if not isinstance(given, dict):
        raise click.UsageError("ARGUMENTS: write a JSON object")
    return cast("Json", given)


def _answer_explanation(out: Output, viewer: Viewer, explanation: Json, who: str) -> int:
    document = {"decision" if name == "behavior" else name: value for name, value in explanation.items()}
    principal: str = explanation["principal"]
    name = viewer.name_of(principal)
    if name == principal and who != "me":
        name = who  # a server tells few names, and this is the one that was asked about
    out.answer(document, lambda page: _show_explanation(page, viewer, document, name))
    return 0


def _show_explanation(page: Page, viewer: Viewer, explanation: Json, name: str) -> None:
    from interlock.cli.bounds import bounds_in_words
    from interlock.cli.render import BAD, GOOD, MAYBE, Text

    decision: str = explanation["decision"]
    mark = {"allow": GOOD, "ask": MAYBE}.get(decision, BAD)
    page.line(mark, " ", Text(decision, "bold"), f"  {name} calls {explanation['tool']}")
    page.line(f"  {explanation['reason']}")
    if explanation["gate"] is not None:
        page.line("  ", MAYBE, f" a person is asked all the same: {explanation['gate']}")
    standing: list[Json] = explanation.get("standing") or []
    for one in standing:
        covers = "covers this call" if one["covers"] else "does not cover this call"
        left = f"{one['uses'] - one['used']} of {one['uses']} uses left, until {one['expiresAt']}"
        page.line(f"  agreed to in advance by {viewer.name_of(one['grantedBy'])}: {one['id']} {covers}; {left}")
        page.line(f"    with {bounds_in_words(one['arguments'])}")
    considered: list[Json] = explanation["considered"]
    for rule in considered:
        if rule["id"] in explanation["rules"]:
            page.line("")
            for number, line in enumerate(str(rule["text"]).splitlines(), rule["line"]):
                page.line(Text(f"  {number:>4}  ", "dim"), line)
    others = [rule for rule in considered if rule["id"] not in explanation["rules"]]
    if others:
        page.line("")
        words = {"yes": "applies", "no": "does not apply"}
        page.table(
            [(f"  {one['effect']}", str(one["id"]), words.get(one["holds"], str(one["holds"]))) for one in others]
        )
    if any(one["covers"] for one in standing):
        page.line("")
        page.line("  this call is made without asking, and takes one use of what was agreed to in advance")
    elif explanation["would_have_to_change"]:
        page.line("")
        page.line("  for this call to be allowed:")
        for advice in explanation["would_have_to_change"]:
            page.line(f"  - {advice}")


# apply


async def _apply_at_server(server: Server, out: Output, /, file: Path) -> int:
    text = _read(file)
    return await _apply(out, file, lambda: server.ask("PUT", "/v1/policy", {"text": text}))


@policy.command()
@at_server(_apply_at_server)
@click.argument("file", type=_FILE)
@over_home
async def apply(app: Interlock, out: Output, /, file: Path) -> int:
    """Make FILE the policy, if it has no faults. Shows what changes, keeps the former policy, and records the change.

    \b
    interlock policy apply new.cedar
    """
    from interlock.api.policy import Policy

    text = _read(file)
    return await _apply(out, file, lambda: Policy(app).apply(text, by=app.caller))


async def _apply(out: Output, file: Path, apply_text: Callable[[], Awaitable[Json]]) -> int:
    from interlock.core.errors import Failure

    try:
        report = await apply_text()
    except Failure as failure:
        faults: list[Json] | None = (failure.details or {}).get("faults")
        if failure.code != "E3004" or faults is None:
            raise
        out.answer({"applied": False, "faults": faults}, lambda page: _show_faults(page, file.name, faults))
        return 1
    diff: list[str] = report["diff"]

    def show_changes(page: Page) -> None:
        from interlock.cli.render import GOOD, Text

        for line in diff:
            page.line(Text(line, {"+": "green", "-": "red"}.get(line[:1], "dim")))
        note = "; the former policy is kept in policy.cedar.previous" if report["previous_kept"] else ""
        page.line(GOOD, f" applied{note}" if diff else " nothing to change")

    out.answer({"applied": True, "diff": diff, "faults": report["faults"]}, show_changes)
    return 0


# forget


async def _forget_at_server(server: Server, out: Output, /, subjects: tuple[str, ...]) -> int:
    body: Json = {"subjects": list(subjects)} if subjects else {}
    return _answer_forgotten(out, await server.post("/v1/policy/forget", body))


@policy.command(short_help="Drop cached decisions about people and agents.")
@at_server(_forget_at_server)
@click.argument("subjects", nargs=-1)
@over_home
async def forget(app: Interlock, out: Output, /, subjects: tuple[str, ...]) -> int:
    """Drop the cached decisions about SUBJECTS, ids of people and agents, in every process; without them, all.

    Needed where a policy engine of your own decides and its answers have changed: decisions are cached for five minutes
    at most. A new policy.cedar counts by itself.

    \b
    interlock policy forget local:alice did:web:agents.example:one
    interlock policy forget
    """
    from interlock.api.policy import Policy

    return _answer_forgotten(out, await Policy(app).forget(subjects or None, by=app.caller))


def _answer_forgotten(out: Output, report: Json) -> int:
    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        about = f"about {', '.join(report['subjects'])}" if report["subjects"] else "about everybody"
        page.line(GOOD, f" cached decisions {about} are dropped in every process")

    out.answer(report, show)
    return 0


def _read(path: Path) -> str:
    from interlock.core.errors import Failure

    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        raise Failure("E3004", f"`{path.name}` cannot be read as text") from None


def _plain(text: str) -> Any:
    from interlock.cli.render import Text, clean

    return Text(clean(text))
